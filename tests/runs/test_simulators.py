import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ligerprof
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase
from ligerprof.runs import simulators as module
from ligerprof.runs.simulators import Simulators, reserved
from ligerprof.units import MIB


def recipes(*batches: int) -> list[TrainingRecipe]:
    return [TrainingRecipe(model="tiny", batch=batch) for batch in batches]


def is_running(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    # a process that has ended stays until its parent waits for it
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulators]:
    monkeypatch.setattr(module, "SERVER", "tests.runs.fake_simulator")
    with closing(Simulators(2)) as simulators:
        yield simulators


def test_announced_and_other_recipes_are_answered_in_any_order(fake: Simulators) -> None:
    one, two, three, four, unexpected = recipes(1, 2, 3, 4, 9)
    fake.expect([one, two, three, four])

    answers = [fake.simulate(recipe) for recipe in (four, unexpected, one, two)]

    found = [answer and (answer.first_bytes, answer.fits) for answer in answers]
    assert found == [(4, True), (9, False), (1, True), (2, True)]
    assert len({answer.steady_bytes for answer in answers if answer}) == 4, "each in a process of its own"


def test_what_fails_elsewhere_is_left_to_this_process(fake: Simulators) -> None:
    failing, next_one, deadly, last, after = recipes(13, 1, 66, 2, 3)
    fake.expect([failing, next_one])

    assert fake.simulate(failing) is None
    assert fake.simulate(next_one) is not None
    assert fake.simulate(deadly) is None
    assert fake.simulate(last) is not None
    assert fake.simulate(after) is not None
    # now the server ends
    assert fake.simulate(recipes(67)[0]) is None
    assert fake.simulate(recipes(5)[0]) is None


def test_processes_end_with_their_client(fake: Simulators) -> None:
    fake.expect(recipes(1, 2))
    answers = [fake.simulate(recipe) for recipe in recipes(1, 2)]

    fake.close()

    deadline = time.monotonic() + 30
    while any(is_running(answer.steady_bytes) for answer in answers if answer) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(answer is None or is_running(answer.steady_bytes) for answer in answers)
    assert fake.simulate(recipes(1)[0]) is not None, "it is known"
    assert fake.simulate(recipes(5)[0]) is None


def test_without_processes_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    unsupported = TrainingRecipe(
        model="tiny", engine="deepspeed", precision="mixed", zero=3, offload="nvme", nvme_path="."
    )
    with closing(Simulators(0)) as none, closing(Simulators(2)) as two:
        none.expect(recipes(1))
        two.expect([unsupported])
        assert none.simulate(recipes(1)[0]) is None
        assert two.simulate(unsupported) is None


@pytest.mark.slow
def test_other_processes_reserve_what_this_one_does() -> None:
    fitting, unfitting = (
        TrainingRecipe(model="tiny", batch=batch, seq=64, memory_limit_bytes=90 * MIB) for batch in (1, 64)
    )
    with closing(Simulators(2)) as simulators:
        simulators.expect([fitting, unfitting])
        found = [simulators.simulate(recipe) for recipe in (fitting, unfitting)]

    assert found == [reserved(ligerprof.simulate(recipe, record=False)) for recipe in (fitting, unfitting)]
    assert [answer and answer.fits for answer in found] == [True, False]


@pytest.mark.parametrize(
    ("phase", "step", "second_bytes", "moment"),
    [
        (Phase.BUILD, 0, None, None),
        (Phase.BACKWARD, 1, None, "first step"),
        (Phase.FORWARD, 2, 0, "second step"),
        (Phase.FORWARD, 2, None, "steady step"),
        (Phase.OPTIMIZER, 3, 7, "steady step"),
        (Phase.EVALUATION, 3, 7, "evaluation"),
    ],
)
def test_the_moment_in_which_memory_ran_out(
    phase: Phase, step: int, second_bytes: int | None, moment: str | None
) -> None:
    outcome: Any = SimpleNamespace(
        first_step_reserved_bytes=1,
        reserved_bytes=2,
        second_step_reserved_bytes=second_bytes,
        evaluation_reserved_bytes=None,
        oom=SimpleNamespace(phase=phase, step=step),
    )
    assert reserved(outcome).failed_in == moment
    assert reserved(outcome).second_bytes == (second_bytes or 0)
