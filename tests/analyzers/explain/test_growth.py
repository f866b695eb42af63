from collections.abc import Callable
from typing import Any

import pytest

from ligerprof.analyzers.explain.analysis import explain
from ligerprof.analyzers.explain.steps import Growth
from ligerprof.snapshots.reader import Snapshot
from tests.torch_memory.allocator.programs import MIB, SlowAllocator

# as torch writes frames, innermost first
Calls = tuple[tuple[str, int, str], ...]
MAIN = ("train.py", 40, "<module>")
OPTIMIZER = (
    ("torch/optim/adam.py", 178, "_init_group"),
    ("torch/optim/adam.py", 238, "step"),
    ("train.py", 15, "loop"),
)


class Program:
    """A training loop on the slow allocator, with stacks."""

    def __init__(self) -> None:
        self.allocator = SlowAllocator()
        self.owner = 0

    def alloc(self, size: int, *calls: tuple[str, int, str]) -> int:
        return self._alloc(size, (*calls, MAIN))

    def alloc_in_autograd(self, size: int) -> int:
        """Autograd's threads have no Python stack."""
        return self._alloc(size, ())

    def _alloc(self, size: int, calls: Calls) -> int:
        self.owner += 1
        return self._with_stack(lambda: self.allocator.alloc(self.owner, size), calls)

    def free(self, owner: int) -> None:
        self._with_stack(lambda: self.allocator.request_free(owner), ())
        self._with_stack(lambda: self.allocator.complete_free(owner), ())

    def _with_stack(self, work: Callable[[], None], calls: Calls) -> int:
        first = len(self.allocator.events)
        work()
        for event in self.allocator.events[first:]:
            event["frames"] = [{"filename": file, "line": line, "name": name} for file, line, name in calls]
        return self.owner

    def growth(self, *, fails: bool = True) -> tuple[Growth, ...]:
        values = self.allocator.snapshot()
        if fails:
            failed = {"action": "oom", "size": 2**34, "stream": 0, "device_free": 0, "frames": []}
            values["device_traces"][0].append(failed)
        report = explain(Snapshot.from_dict(values))
        if report.out_of_memory is not None:
            return report.out_of_memory.growth
        return (report.growth,) if report.growth else ()


def forward(line: int) -> Calls:
    return (("model.py", line, "forward"), ("torch/nn/modules/module.py", 9, "_call_impl"), ("train.py", 12, "loop"))


def train(program: Program, steps: int, extra: Callable[[int], Any]) -> None:
    """Steps with an activation, a gradient, and optimizer states from the first step on."""
    program.alloc(8 * MIB, ("model.py", 3, "__init__"))
    for step in range(1, steps + 1):
        activation = program.alloc(30 * MIB, *forward(20))
        extra(step)
        gradient = program.alloc_in_autograd(8 * MIB)
        program.free(activation)
        if step == 1:
            program.alloc(16 * MIB, *OPTIMIZER)
        program.free(program.alloc(512, ("train.py", 16, "loop")))
        program.free(gradient)


@pytest.mark.parametrize(("steps", "found"), [(1, 0), (2, 1), (8, 1)])
def test_a_list_that_keeps_a_tensor_of_each_step_grows(steps: int, found: int) -> None:
    program = Program()
    train(program, steps, lambda step: program.alloc(4 * MIB, *forward(33)))
    program.alloc(30 * MIB, *forward(20))

    growths = program.growth()

    assert len(growths) == found
    for growth in growths:
        assert (growth.frame, growth.called_from) == ("model.py:33 forward", "train.py:12 loop")
        assert (growth.per_step_bytes, growth.per_step_blocks) == (4 * MIB, 1)
        assert (growth.held_bytes, growth.held_blocks) == (steps * 4 * MIB, steps)


def test_tensors_of_varying_size_grow_by_a_steady_number() -> None:
    program = Program()
    train(program, 7, lambda step: [program.alloc(step % 3 * MIB + MIB, *forward(33)) for _ in range(2)])

    (growth,) = program.growth()

    assert growth.per_step_blocks == 2
    assert growth.steps >= 5


def test_a_tensor_that_is_replaced_by_a_larger_one_grows() -> None:
    program, kept = Program(), [0]

    def extend(step: int) -> None:
        larger = program.alloc(2 * step * MIB, *forward(33))
        if kept[0]:
            program.free(kept[0])
        kept[0] = larger

    train(program, 6, extend)

    (growth,) = program.growth()

    assert (growth.per_step_bytes, growth.per_step_blocks, growth.held_blocks) == (2 * MIB, 0, 1)


@pytest.mark.parametrize(
    "adds",
    [
        lambda step: False,
        lambda step: step == 1,
        # a cache that fills up and then stays
        lambda step: step <= 4,
        # warm-up, and something rare
        lambda step: step in (1, 2, 6),
    ],
)
def test_what_stopped_growing_is_left_out(adds: Callable[[int], bool]) -> None:
    program = Program()
    train(program, 9, lambda step: program.alloc(4 * MIB, *forward(33)) if adds(step) else None)

    assert program.growth() == ()


def test_what_every_second_step_leaves_grows() -> None:
    program = Program()
    train(program, 9, lambda step: program.alloc(4 * MIB, *forward(33)) if step % 2 else None)

    (growth,) = program.growth()

    assert growth.steps == 4


def test_without_a_failure_three_steps_must_add_memory() -> None:
    for steps, found in ((2, 0), (3, 1)):
        program = Program()
        train(program, steps, lambda step, own=program: own.alloc(4 * MIB, *forward(33)))
        program.alloc(60 * MIB, *forward(20))

        assert len(program.growth(fails=False)) == found


def test_repetitions_of_a_script_without_modules_are_those_of_its_loop() -> None:
    program = Program()
    program.alloc(8 * MIB, ("script.py", 5, "prepare"))
    for _ in range(5):
        first = program.alloc(3 * MIB, ("script.py", 21, "work"))
        program.alloc(2 * MIB, ("script.py", 23, "work"))
        program.free(first)

    (growth,) = program.growth()

    assert (growth.frame, growth.per_step_bytes) == ("script.py:23 work", 2 * MIB)
    # the last one is not compared with a later start
    assert growth.steps >= 3


def test_layers_of_the_first_forward_pass_do_not_grow() -> None:
    program = Program()
    for _ in range(6):
        program.alloc(8 * MIB, ("model.py", 3, "__init__"))
    for _ in range(6):
        # one call site for all layers
        program.alloc(4 * MIB, ("model.py", 50, "forward"), *forward(20))
        program.free(program.alloc(MIB, ("model.py", 51, "forward"), *forward(20)))
        program.alloc(4 * MIB, ("model.py", 52, "forward"), *forward(20))

    assert program.growth() == ()
