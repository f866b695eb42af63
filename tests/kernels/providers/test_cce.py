"""cut-cross-entropy as a provider: what it is said to cost, where it cannot run, and what it refuses."""

import dataclasses
import importlib.util

import pytest
import torch

from ligerprof.errors import KernelUnavailableError
from ligerprof.kernels import KernelShape, apply, find_kernel
from ligerprof.kernels.options import LossOptions
from ligerprof.kernels.providers.cce.functions import fused_linear_cross_entropy
from tests.kernels.models import tiny_model
from tests.kernels.test_memory import LLAMA_1B, stated

# extra peak of forward and backward on one H200, cut-cross-entropy 25.1.1, bf16; no label is ignored there
MEASURED_BYTES = {(4096, 2048): 543_686_144, (16384, 2048): 594_116_096, (8192, 4096): 1_119_387_136}
# it keeps positions where a label is ignored, which the formula counts
POSITIONS_BYTES = 4


@pytest.fixture
def _cce_installed() -> None:
    pytest.importorskip("cut_cross_entropy")


@pytest.mark.parametrize(("tokens", "hidden"), MEASURED_BYTES, ids=str)
def test_stated_bytes_are_what_a_gpu_took(tokens: int, hidden: int) -> None:
    shape: KernelShape = dataclasses.replace(LLAMA_1B, tokens=tokens, hidden=hidden, sequences=0)
    memory = stated("flce", shape, "cce")
    stated_bytes = (
        memory.output_bytes + memory.saved_bytes + memory.backward_gradient_bytes + memory.backward_temporary_bytes
    )
    without_positions_bytes = stated_bytes - tokens * POSITIONS_BYTES
    measured_bytes = MEASURED_BYTES[tokens, hidden]
    # labels came in a tensor of the caller's own, and blocks are rounded
    assert abs(without_positions_bytes - tokens * 8 - measured_bytes) <= 4096


def test_it_is_listed_with_the_reason_why_it_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = find_kernel("flce", "cce").unavailable_reason
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda _name: None)
        assert "not installed" in str(reason("cuda"))
        patch.setattr(importlib.util, "find_spec", lambda _name: object())
        assert "only on a GPU" in str(reason("cpu"))
        assert "simulation cannot run" in str(reason("simulated"))
    with pytest.raises(KernelUnavailableError, match="kernel flce of cce: cut-cross-entropy"):
        apply(tiny_model("llama"), "flce", provider="cce")


def test_it_has_only_the_fused_loss() -> None:
    with pytest.raises(KernelUnavailableError, match="provider 'cce' has no kernel 'rms'"):
        apply(tiny_model("llama"), "rms", provider="cce")


@pytest.mark.usefixtures("_cce_installed")
@pytest.mark.parametrize(
    ("options", "missing"),
    [(LossOptions(label_smoothing=0.1), "label smoothing"), (LossOptions(z_loss=1e-4), "z loss")],
    ids=["smoothing", "z-loss"],
)
def test_what_it_has_not_is_refused(options: LossOptions, missing: str) -> None:
    hidden, weight = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(16, 8, dtype=torch.bfloat16)
    with pytest.raises(KernelUnavailableError, match=missing):
        fused_linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64), options)


@pytest.mark.gpu
@pytest.mark.usefixtures("_cce_installed")
def test_its_loss_is_the_references() -> None:
    from ligerprof.kernels.linear_cross_entropy.reference import fused_linear_cross_entropy as reference

    hidden = torch.randn(2, 96, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16) / 16
    labels = torch.randint(0, 1024, (2, 96), device="cuda")
    for options, items in ((LossOptions(shift=True), None), (LossOptions(shift=True), 57)):
        found = fused_linear_cross_entropy(hidden, weight, labels, options, num_items=items)
        exact = reference(hidden.double(), weight.double(), labels, options, num_items=items)
        assert found.item() == pytest.approx(exact.item(), rel=5e-3)
