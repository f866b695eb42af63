"""Which alternatives of a command are run, and in which order those that fit are listed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import UnsupportedError
from ligerprof.recipe.commands.changes import Change, TrainingCommand, find_batches
from ligerprof.recipe.usable_memory import Limit
from ligerprof.runs.command_search import fastest
from ligerprof.runs.command_search.fastest import FastestCommand, fastest_command
from ligerprof.runs.command_search.session import CommandProblem
from ligerprof.runs.command_search.trials import Machine, Outcome, Trial
from ligerprof.runs.recording.settings import SimulatedGpu, Steps
from ligerprof.units import GIB

# seconds of a step, or None if memory runs out
Program = Callable[[int, bool], float | None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FastestCommand]:
    """Search with a program in the place of simulated runs."""

    def search(program: Program, *arguments: str, gpu: str = "h200") -> FastestCommand:
        words = (sys.executable, "train.py", "--batch_size", "4", "--grad_accum", "2", *arguments)
        command = TrainingCommand.read(words)
        machine = Machine(folder=Path(), gpu=SimulatedGpu(gpu=gpu, times=True), steps=Steps(last=2), at_once=1)
        problem = CommandProblem(command=command, limit=Limit(size_bytes=GIB, source="--memory-limit"), machine=machine)

        def run_trials(_problem: Any, note: Any, _begin: Any, wanted: Any) -> bool:
            while chosen := wanted():
                change, limit_bytes = chosen[0]
                batch = change.keys.get("batch_size", 4)
                seconds = program(batch, change.keys.get("gradient_checkpointing", True))
                outcome = Outcome.OUT_OF_MEMORY if seconds is None else Outcome.RAN
                changed = problem.changed(change)
                trial = Trial(
                    command=changed, limit_bytes=limit_bytes, outcome=outcome, seconds=1.0, step_seconds=seconds
                )
                note(change, trial)
            return True

        monkeypatch.setattr(fastest, "run_trials", run_trials)
        return fastest_command(problem, find_batches(command), lambda _name, _trial: None, lambda _name: None)

    return search


def test_smaller_micro_batches_are_left_out_once_a_larger_one_fits(run: Callable[..., FastestCommand]) -> None:
    found = run(lambda batch, _checkpointing: 8.0 / batch)
    assert [change.keys.get("batch_size", 4) for change, _ in found.trials] == [4, 8]
    assert found.change == Change(keys={"batch_size": 8, "grad_accum": 1})
    assert found.own is not None


def test_larger_micro_batches_are_left_out_once_one_runs_out_of_memory(run: Callable[..., FastestCommand]) -> None:
    found = run(lambda batch, _checkpointing: None if batch > 1 else 3.0)
    assert [change.keys.get("batch_size", 4) for change, _ in found.trials] == [4, 2, 1]
    assert found.change == Change(keys={"batch_size": 1, "grad_accum": 8})
    assert found.to_json()["recipes"][0]["step_seconds"] == 3.0


def test_a_gpu_without_rates_is_refused(run: Callable[..., FastestCommand]) -> None:
    with pytest.raises(UnsupportedError, match="rates of mi300x"):
        run(lambda _batch, _checkpointing: 1.0, gpu="mi300x")
