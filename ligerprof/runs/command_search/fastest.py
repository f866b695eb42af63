"""`fit --fastest` and `fit --world`: run a command's alternatives, or splits of GPUs, on simulated GPUs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from ligerprof.analyzers.step_time.rates import SHEETS, find_rates
from ligerprof.errors import UnsupportedError
from ligerprof.recipe.commands.changes import Batches, Change, find_levers, without_checkpointing
from ligerprof.recipe.commands.splits import Split
from ligerprof.runs.command_search.session import (
    Begin,
    CommandProblem,
    Tell,
    changed_json,
    named,
    require_own,
    run_trials,
)
from ligerprof.runs.command_search.trials import Outcome, Trial
from ligerprof.serialization import document, select

# micro-batches that are tried, from the largest one on
_SIZES = 4
_WITH_KERNELS, _CHECKPOINTED = "liger-kernel", "activation checkpointing"


@dataclass(frozen=True, kw_only=True, slots=True)
class FastestCommand:
    """The result of `ligerprof fit --fastest -- COMMAND`.

    Attributes:
        own: the trial of the command as it is; None if it did not end.
        trials: all, in the order of their ends, each with what it changes.
        is_whole: whether the search came to its end.
    """

    problem: CommandProblem
    own: Trial | None
    trials: tuple[tuple[Change, Trial], ...]
    is_whole: bool

    @property
    def fitting(self) -> list[tuple[Change, Trial]]:
        """The trials that fit and whose time is known, the fastest first."""
        known = [(change, trial) for change, trial in self.trials if trial.step_seconds is not None]
        return sorted(known, key=lambda item: item[1].step_seconds or 0.0)

    @property
    def change(self) -> Change:
        """What the fastest one changes."""
        return self.fitting[0][0] if self.fitting else Change()

    @property
    def trial(self) -> Trial | None:
        """The fastest one."""
        return self.fitting[0][1] if self.fitting else None

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof fit --fastest --json -- COMMAND`."""
        return document(
            "fastest",
            self.problem.limit_json,
            {
                "recipes": [self._entry(change, trial) for change, trial in self.fitting],
                "trials": [self._entry(change, trial) for change, trial in self.trials],
            },
        )

    def _entry(self, change: Change, trial: Trial) -> dict[str, Any]:
        return changed_json(self.problem, change, trial) | select(trial, "step_seconds", "time_bound")


def fastest_command(problem: CommandProblem, batches: Batches, tell: Tell, begin: Begin) -> FastestCommand:
    """Run the alternatives of a command that train on as many sequences per step.

    With the same other changes, larger micro-batches than one that does not fit are left out, and smaller ones than one
    that fits, which take longer.

    Raises:
        UnsupportedError: no rates of the GPU are known.
        LigerprofError: the command fails as it is for another reason than memory.
    """
    gpu = problem.machine.gpu.gpu
    if find_rates(gpu) is None:
        raise UnsupportedError(f"the rates of {gpu} are not known. Known: {', '.join(SHEETS)}.")
    alternatives = list(_alternatives(problem, batches))
    known: dict[Change, Trial] = {}
    told: list[tuple[Change, Trial]] = []

    def note(change: Change, trial: Trial) -> None:
        known[change] = trial
        told.append((change, trial))
        tell(named(change), trial)
        require_own(change, trial)

    def wanted() -> list[tuple[Change, int | None]]:
        ended = [(batch, others, known[change].outcome) for change, batch, others in alternatives if change in known]
        left: list[tuple[Change, int | None]] = [
            (change, problem.limit.size_bytes)
            for change, batch, others in alternatives
            if change not in known
            and not any(
                others == same and outcome is (Outcome.RAN if batch < size else Outcome.OUT_OF_MEMORY)
                for size, same, outcome in ended
            )
        ]
        return left[: max(problem.machine.at_once, 1)]

    is_whole = run_trials(problem, note, lambda change: begin(named(change)), wanted)
    return FastestCommand(problem=problem, own=known.get(Change()), trials=tuple(told), is_whole=is_whole)


def _alternatives(problem: CommandProblem, batches: Batches) -> Iterator[tuple[Change, int, Change]]:
    """Changes, each with its micro-batch and the change without that; the command as it is comes first."""
    levers = {lever.name: lever.change for lever in find_levers(problem.command)}
    kernels = [Change(), *(levers[name] for name in levers if name == _WITH_KERNELS)]
    ways = [Change(), *(levers[name] for name in levers if name == _CHECKPOINTED)]
    if (without := without_checkpointing(problem.command)) is not None:
        ways.append(without)
    sizes = sorted({batches.batch, *batches.smaller[-_SIZES:]}, reverse=True)
    yield Change(), batches.batch, Change()
    for batch, kernel, way in product(sizes, reversed(kernels), ways):
        others = kernel.and_then(way)
        change = batches.change(batch).and_then(others)
        if change != Change():
            yield change, batch, others


@dataclass(frozen=True, kw_only=True, slots=True)
class FittingSplits:
    """The result of `ligerprof fit --world N -- COMMAND`.

    Attributes:
        trials: each split whose trial has ended, in the order in which splits are tried.
        is_whole: whether all of them have.
    """

    problem: CommandProblem
    trials: tuple[tuple[Split, Trial], ...]
    is_whole: bool

    @property
    def _first(self) -> tuple[Split, Trial] | None:
        fitting = [item for item in self.trials if item[1].outcome is Outcome.RAN]
        return min(fitting, key=lambda item: item[0].model_ranks, default=None)

    @property
    def change(self) -> Change:
        """What the split changes that fits with the fewest ranks for a model."""
        return self._first[0].change if self._first else Change()

    @property
    def trial(self) -> Trial | None:
        """Its trial."""
        return self._first[1] if self._first else None

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof fit --world N --json -- COMMAND`."""
        world = {"world": self.problem.machine.world}
        return document(
            "splits",
            self.problem.limit_json,
            world | {"splits": [self._entry(split, trial) for split, trial in self.trials]},
        )

    def _entry(self, split: Split, trial: Trial) -> dict[str, Any]:
        fits = None if trial.outcome is Outcome.FAILED else trial.outcome is Outcome.RAN
        own = {"split": split.name, "fits": fits, "ranks": [asdict(rank) for rank in trial.ranks]}
        return own | changed_json(self.problem, split.change, trial)


def fitting_splits(problem: CommandProblem, splits: Sequence[Split], tell: Tell, begin: Begin) -> FittingSplits:
    """Run every split; those that fail do not end the search."""
    known: dict[Change, Trial] = {}
    names = {split.change: split.name for split in splits}

    def note(change: Change, trial: Trial) -> None:
        known[change] = trial
        tell(names[change], trial)

    def wanted() -> list[tuple[Change, int | None]]:
        left = [split.change for split in splits if split.change not in known]
        return [(change, problem.limit.size_bytes) for change in left[: problem.machine.at_once]]

    is_whole = run_trials(problem, note, lambda change: begin(names[change]), wanted)
    trials = tuple((split, known[split.change]) for split in splits if split.change in known)
    return FittingSplits(problem=problem, trials=trials, is_whole=is_whole)
