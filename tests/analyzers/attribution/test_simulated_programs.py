"""Roles in programs that run on the simulated GPU, with the operators in C++ frames and without, by address."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ligerprof.analyzers.explain.analysis import SnapshotAnalysis, analyze
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.runs.outcome import Progress
from ligerprof.runs.recording.saved import storage_address
from ligerprof.runs.simulated.rank import machine_for
from ligerprof.runs.simulated.worker import worker
from ligerprof.simulated_gpu.device import Device
from ligerprof.snapshots.collector import collector_paused
from ligerprof.snapshots.reader import Snapshot
from ligerprof.snapshots.writer import EventContext

STEPS, WIDTH = 2, 256
ENGINE = "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)"


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows the operator that runs."""

    running = ""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.running = self.running, func._schema.name.partition("::")[2]
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.running = before


class Program:
    """A program on this process's simulated GPU, and the truth: event, address and role of tensors."""

    def __init__(self, *, native: bool) -> None:
        self.device = machine_for(TrainingRecipe(model="tiny", gpu="h100")).device
        self.operators = Operators()
        self.device.start_history(most_entries=None, stacks=True, counts=True)
        self.device.observer = self._count
        self.truth: list[tuple[int, int, Role]] = []
        self.annotations: list[dict[str, Any]] = []
        self._native, self._events = native, 0
        self._functions: list[tuple[EventContext, list[str]]] = []

    def _count(self, *_event: object) -> None:
        self._events += 1

    def note(self, role: Role, *tensors: Any) -> None:
        for tensor in tensors:
            self.truth.append((self._events, storage_address(tensor), role))

    def note_states(self, optimizer: torch.optim.Optimizer) -> None:
        states = (value for state in optimizer.state.values() for value in state.values())
        self.note(Role.OPTIMIZER_STATES, *(value for value in states if value.dim()))

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        self.note(Role.PARAMETERS, *model.parameters())
        self.note(Role.GRADIENTS, *(weight.grad for weight in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        self.note_states(optimizer)

    @contextmanager
    def running(self) -> Iterator[None]:
        of_device = Device._context

        def context(device: Device) -> EventContext | None:
            found = of_device(device)
            assert found is not None
            in_backward = torch._C._current_autograd_node() is not None
            functions = [f"at::_ops::{self.operators.running}::call()", *([ENGINE] if in_backward else [])]
            self._functions.append((found, functions))
            return found

        def mark(stage: str, optimizer: Any) -> None:
            name = f"Optimizer.step#{type(optimizer).__name__}.step"
            self.annotations.append({"name": name, "stage": stage, "time_us": self.device.now_us(), "device": 0})

        hooks = (
            register_optimizer_step_pre_hook(lambda optimizer, *_: mark("START", optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: mark("END", optimizer)),
        )
        with collector_paused(), mock.patch.object(Device, "_context", context), torch.device("cuda"), self.operators:
            yield
        for hook in hooks:
            hook.remove()

    def snapshot(self) -> Snapshot:
        values = self.device.snapshot()
        frames = {name: {"filename": "??", "line": 0, "name": name} for _, names in self._functions for name in names}
        for found, names in self._functions:
            python = [frame for frame in found.frames if not is_of_simulation(frame)]
            found.frames[:] = [frames[name] for name in names if self._native] + python
        return Snapshot.from_dict({**values, "external_annotations": self.annotations})


def is_of_simulation(frame: dict[str, Any]) -> bool:
    of_process = "/simulated_gpu/" in frame["filename"] or "/runs/simulated/" in frame["filename"]
    return of_process or frame["name"] in ("__torch_dispatch__", "context")


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(dtype)


def deep_copied(program: Program) -> object:
    model = layers()
    average, optimizer = copy.deepcopy(model), torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        program.train(model, optimizer, torch.randn(512, WIDTH))
        program.note(Role.PARAMETERS, *average.parameters())
    return model, average, optimizer


def best_so_far(program: Program) -> object:
    model = layers()
    optimizer, best = torch.optim.AdamW(model.parameters()), ()
    for _ in range(STEPS):
        program.train(model, optimizer, torch.randn(512, WIDTH))
        best = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        program.note(Role.PARAMETERS, *best[0].values())
        large = (state for states in best[1]["state"].values() for state in states.values() if state.dim())
        program.note(Role.OPTIMIZER_STATES, *large)
    program.train(model, optimizer, torch.randn(512, WIDTH))
    return model, optimizer, best


def built_later(program: Program) -> object:
    earlier = layers()
    program.train(earlier, torch.optim.AdamW(earlier.parameters()), torch.randn(512, WIDTH))
    del earlier
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        program.train(model, optimizer, torch.randn(512, WIDTH))
        program.note(Role.PARAMETERS, *model.parameters())
    return model, optimizer


def states_from_the_start(program: Program) -> object:
    model = layers()
    optimizer = torch.optim.Adagrad(model.parameters())
    for _ in range(STEPS):
        program.train(model, optimizer, torch.randn(512, WIDTH))
    return model, optimizer


def listed_copies(program: Program) -> object:
    model = layers()
    average = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        program.train(model, optimizer, torch.randn(512, WIDTH))
        program.note(Role.PARAMETERS, *average.values())
    return model, average, optimizer


def own_mixed_precision(program: Program) -> object:
    model = layers(torch.bfloat16)
    masters = [weight.detach().float().requires_grad_() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    for _ in range(STEPS):
        model(torch.randn(512, WIDTH).to(torch.bfloat16)).square().mean().backward()
        for master, weight in zip(masters, model.parameters(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            program.note(Role.GRADIENTS, weight.grad, master.grad)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        program.note(Role.OPTIMIZER_STATES, *masters)
        program.note_states(optimizer)
    return model, masters, optimizer


def wrong_roles(program: Program, found: SnapshotAnalysis) -> set[tuple[Role, Role]]:
    replayed = found.replayed
    address_of = replayed.addresses_of(np.arange(len(replayed.block_bytes), dtype=np.int64)).tolist()
    wrong = set()
    for moment, address, expected in program.truth:
        block = next(each for each in replayed.live_at(moment).tolist() if address_of[each] == address)
        role = found.attribution.roles_of(np.array([block]), found.peak_moment)[0]
        if role is not expected:
            wrong.add((expected, role))
    return wrong


PROGRAMS = {
    program.__name__: program
    for program in (deep_copied, best_so_far, built_later, states_from_the_start, listed_copies)
}
PROGRAMS[own_mixed_precision.__name__] = own_mixed_precision


def wrong_roles_of(_progress: Progress, *, name: str, native: bool) -> set[tuple[Role, Role]]:
    """The roles that an analysis of a program finds wrongly, on the simulated GPU of this process."""
    program = Program(native=native)
    with program.running():
        kept = PROGRAMS[name](program)
        snapshot = program.snapshot()
        del kept
    return wrong_roles(program, analyze(snapshot))


# (role, role found): what a script computes from gradients has no name, and without operators nothing shows that a list
# of tensors as large as the weights is a copy of them
@pytest.mark.parametrize("native", [True, False], ids=["C++ frames", "Python frames"])
@pytest.mark.parametrize(
    ("name", "unnamed", "unnamed_without_operators"),
    [
        ("deep_copied", set(), set()),
        ("best_so_far", set(), set()),
        ("built_later", set(), set()),
        ("states_from_the_start", set(), set()),
        ("listed_copies", set(), {Role.PARAMETERS}),
        ("own_mixed_precision", {Role.GRADIENTS}, {Role.GRADIENTS, Role.OPTIMIZER_STATES}),
    ],
)
def test_copies_of_weights_and_states_are_no_inputs(
    name: str, unnamed: set[Role], unnamed_without_operators: set[Role], native: bool
) -> None:
    task = f"{__name__}:wrong_roles_of"
    wrong = worker().run(task, None, lambda _text: None, name=name, native=native)
    assert wrong == {(role, Role.UNATTRIBUTED) for role in (unnamed if native else unnamed_without_operators)}
