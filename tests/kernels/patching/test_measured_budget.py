"""The measured budget: it follows torch's memory counters, and only shrinks."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ligerprof.errors import RecipeError
from ligerprof.kernels import apply, find_kernel
from ligerprof.kernels.linear_cross_entropy.plan import plan_chunks
from ligerprof.kernels.options import LossOptions
from ligerprof.kernels.patching.causal_lm import MeasuredBudget
from ligerprof.kernels.spec import load_entry
from tests.kernels.models import batch, tiny_model
from tests.kernels.oracle import LOSS_ROUNDINGS, in_fp64, relative_error, run
from tests.kernels.test_memory import LLAMA_1B, stated

GIB = 2**30


class Counters:
    """Replaces torch's memory counters of a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.highest, self.allocated = 8 * GIB, 4 * GIB
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: self.highest)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: self.allocated)


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    return Counters(monkeypatch)


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    with FakeTensorMode():
        hidden = torch.empty(4, 1024, 2048, dtype=torch.bfloat16)
        return hidden, torch.empty(128256, 2048, dtype=torch.bfloat16).requires_grad_()


def forward_bytes(budget: str | int) -> int:
    memory = stated("flce", dataclasses.replace(LLAMA_1B, flce_budget=budget))
    return memory.output_bytes + memory.saved_bytes + memory.forward_temporary_bytes + memory.forward_gradient_bytes


def test_the_first_calls_are_lean_and_the_third_takes_what_is_left(counters: Counters) -> None:
    budget = MeasuredBudget(find_kernel("flce"))
    assert [budget.next(*tensors()) for _ in range(2)] == ["lean", "lean"]
    taken = budget.next(*tensors())
    room_bytes = counters.highest - counters.allocated
    assert isinstance(taken, int)
    assert forward_bytes(taken) <= room_bytes
    # one chunk of all tokens fits, and the budget says how much more there is
    assert plan_chunks(tokens=4096, hidden=2048, vocab=128256, element_bytes=2, budget=taken).chunks == 1
    assert taken > room_bytes - forward_bytes("lean") - 64 * 2**20


def test_it_shrinks_with_the_room_and_does_not_grow_back(counters: Counters) -> None:
    budget = MeasuredBudget(find_kernel("flce"))
    first = [budget.next(*tensors()) for _ in range(3)][-1]
    counters.allocated += GIB
    second = budget.next(*tensors())
    counters.allocated -= GIB
    assert isinstance(first, int)
    assert second == first - GIB == budget.next(*tensors())
    counters.allocated = counters.highest
    assert budget.next(*tensors()) == "lean"
    counters.allocated = 0
    assert budget.next(*tensors()) == "lean"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_budgets_differ_by_rounding_alone(dtype: torch.dtype, device: torch.device) -> None:
    """What is free, and so the number of chunks, may differ from run to run."""
    states = torch.randn(33, 16, device=device).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(61, 16, device=device)).to(dtype).requires_grad_()
    labels = torch.randint(61, (33,), device=device)
    kernel, reference = (load_entry(name) for name in (find_kernel("flce").entry, find_kernel("flce").reference))

    def results(budget: str | int) -> list[torch.Tensor]:
        return run(lambda x, w: kernel(x, w, labels, LossOptions(budget=budget)), [states, weight])

    truth = run(lambda x, w: reference(x, w, labels.cpu(), LossOptions()), in_fp64([states, weight]))
    chunks = set()
    sizes = {"tokens": 33, "hidden": 16, "vocab": 61, "element_bytes": dtype.itemsize}
    for budget in ("lean", 16 * 64 * dtype.itemsize, 2**20):
        chunks.add(plan_chunks(**sizes, budget=budget).chunks)
        found = results(budget)
        assert all(torch.equal(one, other) for one, other in zip(found, results(budget), strict=True))
        errors = [relative_error(value, right) for value, right in zip(found, truth, strict=True)]
        assert max(errors) <= LOSS_ROUNDINGS[dtype]
    assert len(chunks) > 1


def test_counters_that_are_reset_do_not_make_it_forget(counters: Counters) -> None:
    budget = MeasuredBudget(find_kernel("flce"))
    before = [budget.next(*tensors()) for _ in range(3)][-1]
    counters.highest = counters.allocated
    assert budget.next(*tensors()) == before


def test_a_device_without_counters_is_refused() -> None:
    with pytest.raises(RecipeError, match="measures ligerprof's fused loss on a CUDA device, not ligerprof's on cpu"):
        apply(tiny_model("llama"), "flce", flce_budget="auto", device_kind="cpu")
    with pytest.raises(RecipeError, match="not torch's on cuda"):
        apply(tiny_model("llama"), "flce", provider="torch", flce_budget="auto", device_kind="cuda")


@pytest.mark.gpu
def test_training_with_auto_holds_no_more_than_lean() -> None:
    def peak_bytes(flce_budget: str) -> int:
        torch.cuda.empty_cache()
        model = tiny_model("llama", device="cuda", vocab_size=50000)
        given = batch(model, sequences=8, tokens=1024)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        base_bytes = torch.cuda.memory_allocated()
        with apply(model, "all", flce_budget=flce_budget):
            torch.cuda.reset_peak_memory_stats()
            for _ in range(5):
                model(**given).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return torch.cuda.max_memory_allocated() - base_bytes

    assert peak_bytes("auto") <= peak_bytes("lean")
