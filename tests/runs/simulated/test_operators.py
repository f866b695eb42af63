"""Temporaries of CUDA's operators, call by call, against what one H200 allocated."""

import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.outcome import Progress
from ligerprof.runs.simulated.rank import machine_for
from ligerprof.runs.simulated.worker import worker
from ligerprof.simulated_gpu import attention
from ligerprof.torch_memory.attention import AttentionKernel
from tests.paths import TRUTH

ROWS = [json.loads(line) for line in (TRUTH / "h200-operators.jsonl").read_text().splitlines()]


class Simulated:
    """Runs calls on this process's simulated GPU; tells the sizes taken (positive) and given back (negative)."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        machine_for(TrainingRecipe(model="tiny"), endless=True).device.observer = self._observe

    def _observe(self, action: str, _address: int, size_bytes: int, _context: object) -> None:
        signs = {"alloc": 1, "free_completed": -1}
        if action in signs:
            self._sizes.append(signs[action] * size_bytes)

    def sizes(self, call: Callable[[], Any]) -> tuple[Any, list[int]]:
        self._sizes = []
        result = call()
        return result, self._sizes.copy()


def _leaf(batch: int, heads: int, row: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, row["dtype"])
    return torch.empty(batch, row["tokens"], heads, row["head_dim"], dtype=dtype).transpose(1, 2)


def name(row: dict[str, Any]) -> str:
    return " ".join(str(value) for key, value in row.items() if key not in ("forward", "backward"))


def attend(row: dict[str, Any], simulated: Simulated) -> dict[str, list[int]]:
    batch = row["batch"]
    query = _leaf(batch, row["heads"], row).requires_grad_()
    key, value = (_leaf(batch, row["kv_heads"], row).requires_grad_() for _ in range(2))
    mask = torch.empty(batch, 1, row["tokens"], row["tokens"], dtype=torch.bool) if row["mask"] else None
    options = {"attn_mask": mask, "dropout_p": row["dropout"], "is_causal": mask is None}
    options["enable_gqa"] = row["heads"] != row["kv_heads"]
    with mock.patch.object(attention, "choose_kernel", return_value=AttentionKernel(row["kernel"])):
        output, forward = simulated.sizes(lambda: F.scaled_dot_product_attention(query, key, value, **options))
    gradient = _leaf(batch, row["heads"], row)
    _, backward = simulated.sizes(lambda: torch.autograd.grad(output, (query, key, value), gradient))
    return {"forward": forward, "backward": backward}


def embed(row: dict[str, Any], simulated: Simulated) -> dict[str, list[int]]:
    weight = torch.empty(row["rows"], row["columns"], dtype=torch.bfloat16, requires_grad=True)
    indices = torch.empty(row["tokens"], dtype=torch.int64)
    output = F.embedding(indices, weight)
    gradient = torch.empty_like(output)
    return {"backward": simulated.sizes(lambda: torch.autograd.grad(output, weight, gradient))[1]}


def normalize(row: dict[str, Any], simulated: Simulated) -> dict[str, list[int]]:
    dtype, columns = getattr(torch, row["dtype"]), row["columns"]
    source = torch.empty(row["rows"], columns, dtype=dtype, requires_grad=True)
    weight, bias = (torch.empty(columns, dtype=dtype, requires_grad=True) for _ in range(2))
    output, forward = simulated.sizes(lambda: F.layer_norm(source, (columns,), weight, bias))
    gradient = torch.empty_like(output)
    _, backward = simulated.sizes(lambda: torch.autograd.grad(output, (source, weight, bias), gradient))
    return {"forward": forward, "backward": backward}


def reduce(row: dict[str, Any], simulated: Simulated) -> dict[str, list[int]]:
    source = torch.empty(row["shape"], dtype=getattr(torch, row["dtype"]))
    reduced = getattr(source, row["name"])
    return {"forward": simulated.sizes(lambda: reduced() if row["dims"] is None else reduced(row["dims"]))[1]}


def settle(weight: Tensor) -> None:
    """Let autograd's thread drop the results of `torch.autograd.grad`, which it does before its next task."""
    (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]


CALLS = {"attention": attend, "embedding": embed, "layer_norm": normalize, "reduction": reduce}


def run_here(_progress: Progress) -> dict[str, dict[str, list[int]]]:
    """What each row's passes take and give back, on the simulated GPU of this process."""
    simulated = Simulated()
    with torch.device("cuda"):
        weight, found = torch.empty(8, 8, requires_grad=True), {}
        for row in ROWS:
            # the rows were recorded when both threads had their cuBLAS workspaces
            settle(weight)
            found[name(row)] = CALLS[row["op"]](row, simulated)
        return found


@pytest.fixture(scope="module")
def taken() -> dict[str, dict[str, list[int]]]:
    found: dict[str, dict[str, list[int]]] = worker().run(f"{__name__}:run_here", None, lambda _text: None)
    return found


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_an_operator_takes_what_cuda_takes(row: dict[str, Any], taken: dict[str, dict[str, list[int]]]) -> None:
    found = taken[name(row)]
    assert found == {key: row[key] for key in found}
