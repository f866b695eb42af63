"""The tensors that autograd saved, as the recorders note them on the CPU."""

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ligerprof
from ligerprof.analyzers.explain.analysis import explain
from ligerprof.roles import Phase, Role
from ligerprof.runs.recording.saved import SavedTensors, _operation_of, storage_address
from ligerprof.runs.recording.stamping import Stamper
from ligerprof.snapshots.reader import read_snapshot
from ligerprof.snapshots.stamp import SavedTensor

# without it, reading a saved tensor would call hooks
pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"), reason="this torch does not show saved tensors"
)


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

    def locate(tensor: Tensor) -> tuple[int, int] | None:
        # numbers in expressions are scalars, which a GPU's memory does not hold
        return (0, storage_address(tensor)) if tensor.dim() else None

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
    return list(saved.rows)


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


def test_notes_leave_no_reference_to_the_storages_of_saved_tensors() -> None:
    bindings: Any = torch._C
    model, given = Model(), torch.ones(4, 8)

    def references() -> list[int]:
        return [
            bindings._storage_Use_Count(bindings._storage_address(tensor))
            for node in nodes_of(output)
            for name in dir(node)
            if name.startswith("_raw_saved")
            for raw in [getattr(node, name)]
            if isinstance(tensor := getattr(raw, "data", None), Tensor)
        ]

    output = torch.exp(model(given)).sum()
    before = references()
    assert noted(output)
    assert references() == before
    assert before


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
    stamper.open()
    stamper.attach(model)
    model(torch.ones(4, 8, requires_grad=True) * 1)
    stamper.close()

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


@pytest.mark.gpu
def test_notes_change_no_gpu_memory_and_fit_the_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the first run creates cuBLAS's workspaces
    alone = [_peak_on_gpu() for _ in range(2)][-1]
    with ligerprof.record(tmp_path / "noted"):
        noted = _peak_on_gpu()
    monkeypatch.setattr(SavedTensors, "note", lambda *_arguments: None)
    with ligerprof.record(tmp_path / "silent"):
        silent = _peak_on_gpu()
    assert noted == silent == alone

    snapshot = read_snapshot(tmp_path / "noted")
    rows, trace = snapshot.saved_tensors, snapshot.trace_of(0)
    allocated: dict[tuple[int, int], list[int]] = defaultdict(list)
    freed: dict[int, list[int]] = defaultdict(list)
    for event in trace:
        if event["action"] == "alloc":
            allocated[event["addr"], event["size"]].append(event["time_us"])
        elif event["action"] == "free_requested":
            freed[event["addr"]].append(event["time_us"])

    def fits(row: SavedTensor) -> bool:
        """Whether the block was live when the note was taken, by the clock of the events."""
        starts = [time for time in allocated[row.address, row.size_bytes] if time <= row.time_us]
        return bool(starts) and not any(max(starts) < time < row.time_us for time in freed[row.address])

    assert len(rows) > NOTED_STEPS * 8 * 4
    assert sum(map(fits, rows)) == len(rows)

    kept = [row for row in explain(snapshot).rows if row.role is Role.ACTIVATIONS and row.phase is Phase.FORWARD]
    assert sum(row.size_bytes for row in kept if row.kept_by) >= 0.95 * sum(row.size_bytes for row in kept) > 0
    assert ("layers.*", "silu", "MulBackward0") in {(row.module, row.operation, row.kept_by) for row in kept}


GPU_STEPS, NOTED_STEPS = 3, 2


class WideMlp(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down = nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1024, bias=False)


def _peak_on_gpu() -> int:
    """Peak bytes of a few steps beyond what was allocated before them; the last of them includes activations."""
    torch.manual_seed(0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = Model()
    model.layers = nn.ModuleList([WideMlp() for _ in range(8)])
    model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(GPU_STEPS):
        model(torch.ones(8192, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    ("node", "operation"),
    [
        ("MaxPool2DWithIndicesBackward0", "max_pool2d_with_indices"),
        ("FftR2CBackward0", "fft_r2c"),
        ("ScaledDotProductFlashAttentionBackward0", "scaled_dot_product_flash_attention"),
    ],
)
def test_nodes_have_the_names_of_operators(node: str, operation: str) -> None:
    assert _operation_of(node, is_python=False) == operation
