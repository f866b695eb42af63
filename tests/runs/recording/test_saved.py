"""The tensors that autograd saved, as the recorders note them on the CPU."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ligerprof.runs.recording.saved import SavedTensors
from ligerprof.runs.recording.stamping import Stamper
from ligerprof.snapshots.saved import SavedTensor

SCALAR_BYTES = 8


class Keeps(torch.autograd.Function):
    """Saves one argument as torch asks for it, and another as an attribute."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left)
        ctx.right = right
        return left * right

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate = self.gate(hidden)
        self.seen = {"gate": gate.data_ptr(), "silu": 0, "exp": 0}
        silu = functional.silu(gate)
        self.seen["silu"] = silu.data_ptr()
        output: Tensor = self.down(silu * gate)
        return output


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp()])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def saved_tensors() -> SavedTensors:
    ticks = iter(range(1_000_000))

    def locate(_tensor: Tensor, storage: torch.UntypedStorage) -> tuple[int, int] | None:
        # numbers in expressions are scalars, which a GPU's memory does not hold
        return (0, storage.data_ptr()) if storage.nbytes() > SCALAR_BYTES else None

    return SavedTensors(locate=locate, clock=lambda: next(ticks))


def nodes_of(*roots: Tensor) -> Iterator[Any]:
    pending, seen = [root.grad_fn for root in roots], set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending.extend(following for following, _ in node.next_functions)


def noted(output: Tensor) -> list[SavedTensor]:
    saved = saved_tensors()
    for node in nodes_of(output):
        saved.note(node, "model")
    return saved.rows


def test_notes_are_the_tensors_that_the_nodes_unpack() -> None:
    model, given = Model(), torch.ones(4, 8)
    output = torch.exp(model(given)).sum()

    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    unpacked = {
        (node.name(), tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        for node in nodes_of(output)
        for name in dir(node)
        if name.startswith("_saved") and isinstance(tensor := getattr(node, name), Tensor)
    }
    rows = noted(output)
    assert {(row.node, row.address, row.size_bytes) for row in rows} == {
        saved for saved in unpacked if saved[1] not in weights
    }
    assert len(rows) > len(model.layers) * 3


@pytest.mark.parametrize(
    ("compute", "kept"),
    [
        (lambda x: functional.silu(x * 2) * 3, {("SiluBackward0", "mul")}),
        # a result is saved by the node that computed it
        (lambda x: torch.exp(x * 2), {("ExpBackward0", "exp")}),
        # a view shows another tensor's storage, and a product of three dimensions is an unsafe view
        (lambda x: torch.sin((x * 2).view(8, 4).t()), {("SinBackward0", "mul")}),
        (lambda x: torch.sin(functional.linear(x.view(2, 2, 8), torch.ones(8, 8))), {("SinBackward0", "mm")}),
        (lambda x: Keeps.apply(x * 2, torch.cos(x)).sum(), {("KeepsBackward", "mul"), ("KeepsBackward", "cos")}),
        (lambda x: torch.sin(Keeps.apply(x, x)), {("SinBackward0", "Keeps")}),
    ],
    ids=["operator", "result", "view", "unsafe-view", "function", "of-a-function"],
)
def test_note_says_which_node_saved_what_was_computed_how(compute: Callable[[Tensor], Tensor], kept: set[Any]) -> None:
    given = torch.ones(4, 8, requires_grad=True)
    rows = noted(compute(given))
    given_address = given.data_ptr()
    computed = {(row.node, row.operation) for row in rows if row.address != given_address and row.operation}
    assert kept <= computed
    # an argument that is a leaf is a weight
    assert not any(row.address == given_address for row in rows)


def test_tensors_that_hooks_packed_are_skipped_and_hooks_are_not_called() -> None:
    unpacked = []
    given = torch.ones(4, 8, requires_grad=True)

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    with saved_tensors_hooks(lambda tensor: (tensor.clone(),), lambda packed: unpack(packed[0])):
        by_hook = torch.sin(given * 2)
    with save_on_cpu():
        offloaded = torch.sin(given * 2)
    again = checkpoint(lambda x: torch.sin(x * 2), given, use_reentrant=False)

    assert [noted(output) for output in (by_hook, offloaded, again)] == [[], [], []]
    assert unpacked == []


def test_notes_keep_neither_tensors_nor_nodes_alive() -> None:
    given = torch.ones(4, 8, requires_grad=True)
    hidden = given * 2
    output = torch.sin(hidden)
    ends = weakref.ref(hidden.untyped_storage()), weakref.ref(hidden)
    gc.disable()
    try:
        rows = noted(output)
        del hidden, output
        assert len(rows) == 1
        assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()


def test_node_that_has_run_has_nothing_saved() -> None:
    output = torch.sin(torch.ones(4, requires_grad=True) * 2).sum()
    node: Any = output.grad_fn
    output.backward()
    assert noted(output) == []
    assert node is not None


def test_stamper_notes_each_module_with_its_name_and_recomputation_too() -> None:
    model, saved = Model(), saved_tensors()
    stamper = Stamper(lambda _text: None, saved)
    stamper.attach(model)
    model(torch.ones(4, 8, requires_grad=True) * 1)
    stamper.detach()

    for layer in model.layers:
        assert isinstance(layer, Mlp)
        by_address = {row.address: row for row in saved.rows}
        silu = by_address[layer.seen["silu"]]
        assert (silu.node, silu.operation) == ("MulBackward0", "silu")
    assert {(row.module, row.node, row.operation) for row in saved.rows if row.operation} >= {
        (f"layers.{number}", node, operation)
        for number in range(2)
        for node, operation in (("SiluBackward0", "mm"), ("MulBackward0", "silu"), ("MulBackward0", "mm"))
    }
    assert {row.module for row in saved.rows if row.node == "MmBackward0"} == {
        f"layers.{number}.{part}" for number in range(2) for part in ("gate", "down")
    }
