"""Temporaries of CUDA's operators, call by call, against what one H200 allocated."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ligerprof.gpus import find_gpu
from ligerprof.runs.simulated import attention
from ligerprof.runs.simulated.device import DeviceLimits, SimulatedDevice
from ligerprof.runs.simulated.patches import simulated_process
from ligerprof.runs.simulated.recorder import StorageRecorder
from ligerprof.torch_memory.allocator.settings import AllocatorSettings
from ligerprof.torch_memory.attention.selection import AttentionKernel
from tests.paths import TRUTH

ROWS = [json.loads(line) for line in (TRUTH / "h200-operators.jsonl").read_text().splitlines()]


class Simulated:
    """Runs calls on fake tensors and tells the sizes that they took (positive) and gave back (negative)."""

    def __init__(self) -> None:
        gpu = find_gpu("h200")
        self.device = SimulatedDevice(
            gpu, DeviceLimits(capacity_bytes=2**40, limit_bytes=None), AllocatorSettings(), record=True
        )
        self.stack = ExitStack()
        recorder = StorageRecorder(self.device)
        for context in (simulated_process(gpu, recorder, set()), FakeTensorMode(), recorder):
            self.stack.enter_context(context)

    def sizes(self, call: Callable[[], Any]) -> tuple[Any, list[int]]:
        start = len(self.device.events)
        result = call()
        events = self.device.events[start:]
        signs = {"alloc": 1, "free_completed": -1}
        return result, [signs[event.action] * event.size_bytes for event in events if event.action in signs]


@pytest.fixture(scope="module")
def simulated() -> Iterator[Simulated]:
    machine = Simulated()
    with machine.stack:
        # the rows were recorded when both threads had their cuBLAS workspaces
        warm = torch.empty(8, 8, requires_grad=True)
        torch.autograd.grad((warm @ warm).sum(), warm)
        yield machine


def _leaf(batch: int, heads: int, row: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, row["dtype"])
    return torch.empty(batch, row["tokens"], heads, row["head_dim"], dtype=dtype).transpose(1, 2)


def name(row: dict[str, Any]) -> str:
    return " ".join(str(value) for key, value in row.items() if key not in ("forward", "backward"))


@pytest.mark.parametrize("row", [row for row in ROWS if row["op"] == "attention"], ids=name)
def test_attention_takes_what_cuda_takes(
    row: dict[str, Any], simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "choose_kernel", lambda *_: AttentionKernel(row["kernel"]))
    batch = row["batch"]
    query = _leaf(batch, row["heads"], row).requires_grad_()
    key, value = (_leaf(batch, row["kv_heads"], row).requires_grad_() for _ in range(2))
    mask = torch.empty(batch, 1, row["tokens"], row["tokens"], dtype=torch.bool) if row["mask"] else None
    options = {"attn_mask": mask, "dropout_p": row["dropout"], "is_causal": mask is None}
    options["enable_gqa"] = row["heads"] != row["kv_heads"]
    output, forward = simulated.sizes(lambda: F.scaled_dot_product_attention(query, key, value, **options))
    gradient = _leaf(batch, row["heads"], row)
    _, backward = simulated.sizes(lambda: torch.autograd.grad(output, (query, key, value), gradient))
    assert (forward, backward) == (row["forward"], row["backward"])


@pytest.mark.parametrize("row", [row for row in ROWS if row["op"] == "embedding"], ids=name)
def test_embedding_gradient_takes_what_cuda_takes(row: dict[str, Any], simulated: Simulated) -> None:
    weight = torch.empty(row["rows"], row["columns"], dtype=torch.bfloat16, requires_grad=True)
    indices = torch.empty(row["tokens"], dtype=torch.int64)
    output = F.embedding(indices, weight)
    gradient = torch.empty_like(output)
    _, backward = simulated.sizes(lambda: torch.autograd.grad(output, weight, gradient))
    assert backward == row["backward"]


@pytest.mark.parametrize("row", [row for row in ROWS if row["op"] == "layer_norm"], ids=name)
def test_layer_norm_takes_what_cuda_takes(row: dict[str, Any], simulated: Simulated) -> None:
    dtype, columns = getattr(torch, row["dtype"]), row["columns"]
    source = torch.empty(row["rows"], columns, dtype=dtype, requires_grad=True)
    weight, bias = (torch.empty(columns, dtype=dtype, requires_grad=True) for _ in range(2))
    output, forward = simulated.sizes(lambda: F.layer_norm(source, (columns,), weight, bias))
    gradient = torch.empty_like(output)
    _, backward = simulated.sizes(lambda: torch.autograd.grad(output, (source, weight, bias), gradient))
    assert (forward, backward) == (row["forward"], row["backward"])


@pytest.mark.parametrize("row", [row for row in ROWS if row["op"] == "reduction"], ids=name)
def test_reduction_takes_what_cuda_takes(row: dict[str, Any], simulated: Simulated) -> None:
    source = torch.empty(row["shape"], dtype=getattr(torch, row["dtype"]))
    reduce = getattr(source, row["name"])
    _, forward = simulated.sizes(lambda: reduce() if row["dims"] is None else reduce(row["dims"]))
    assert forward == row["forward"]
