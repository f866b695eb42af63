"""Models that a process keeps while it trains a later one, on the simulated GPU; models that a step uses are none."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.roles import Role
from ligerprof.runs.outcome import Progress
from ligerprof.runs.simulated.worker import worker
from tests import recorded
from tests.analyzers.attribution.test_simulated_programs import Program

WIDTH, WEIGHTS = 512, 4 * 4 * 512 * 513


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Distilled(nn.Module):
    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            expected = self.teacher(x)
        return self.student(x) - expected


def train(model: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        model(torch.ones(64, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained() -> tuple[nn.Module, Any]:
    model = Model()
    optimizer = AdamW(model.parameters())
    train(model, optimizer)
    return model, optimizer


def kept() -> object:
    return [trained() for _ in range(2)]


def kept_weights() -> object:
    return trained()[0], trained()


def teacher() -> object:
    expert, student = trained(), Model()
    optimizer = AdamW(student.parameters())
    for _ in range(2):
        with torch.no_grad():
            expected = expert[0](torch.ones(64, WIDTH))
        (student(torch.ones(64, WIDTH)) - expected).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return expert, student, optimizer


def wrapped_teacher() -> object:
    expert, student = trained(), Model()
    optimizer = AdamW(student.parameters())
    train(Distilled(expert[0], student), optimizer)
    return expert, student, optimizer


def later_critic() -> object:
    generator, critic = trained(), Model()
    optimizer = AdamW(critic.parameters())
    for _ in range(2):
        critic(generator[0](torch.ones(64, WIDTH))).mean().backward()
        generator[1].step()
        optimizer.step()
        generator[1].zero_grad()
        optimizer.zero_grad()
    return generator, critic, optimizer


def new_head() -> object:
    model, head = trained()[0], nn.Linear(WIDTH, 8)
    optimizer = AdamW(head.parameters())
    train(nn.Sequential(model.requires_grad_(requires_grad=False), head), optimizer)
    return model, head, optimizer


def replaced() -> object:
    """The names of the first model still hold it while the second one trains."""
    model, optimizer = trained()
    model, optimizer = trained()
    return model, optimizer


def deleted() -> object:
    model, optimizer = trained()
    del model, optimizer
    return trained()


def loaded() -> object:
    model, optimizer = trained()
    best = copy.deepcopy(model).load_state_dict(model.state_dict())
    train(model, optimizer)
    return model, optimizer, best


def report_here(_progress: Progress, *, run: Callable[[], object]) -> PeakReport:
    """The report of a program on the simulated GPU of this process."""
    program = Program(native=False)
    with program.running():
        everything = run()
        snapshot = program.snapshot()
        del everything
    return analyze(snapshot).peak


def report(run: Callable[[], object]) -> PeakReport:
    found: PeakReport = worker().run(f"{__name__}:report_here", None, lambda _text: None, run=run)
    return found


def saving(found: PeakReport) -> int:
    return sum(one.saves_bytes or 0 for one in found.suggestions if one.name == "earlier-models")


@pytest.mark.parametrize(("run", "held_bytes"), [(kept, 3 * WEIGHTS), (kept_weights, WEIGHTS), (replaced, 3 * WEIGHTS)])
def test_an_earlier_model_that_is_still_held_is_named(run: Callable[[], object], held_bytes: int) -> None:
    found = report(run)

    assert saving(found) == pytest.approx(held_bytes, rel=0.01)
    assert found.suggestions[0].name == "earlier-models"
    assert "models that the process built earlier" in found.notes[-1]


@pytest.mark.parametrize("run", [teacher, wrapped_teacher, later_critic, new_head, deleted, loaded, trained])
def test_models_that_a_step_uses_are_not_earlier_ones(run: Callable[[], object]) -> None:
    found = report(run)

    assert not saving(found)
    assert not any("earlier" in note for note in found.notes)


def test_blocks_older_than_the_recording_are_named() -> None:
    found = recorded.report("oom-optimizer")

    assert found.roles[Role.OTHER] == 480_282_752
    assert found.roles[Role.UNATTRIBUTED] == 0
    suggestion = next(one for one in found.suggestions if one.name == "earlier-models")
    assert suggestion.saves_bytes == pytest.approx(480_282_752, rel=0.01)
    # 224 MiB were missing
    assert suggestion.lets_pass
