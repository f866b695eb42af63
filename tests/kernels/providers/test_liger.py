"""liger-kernel through our door: its numbers, its stated bytes, and what its patching leaves behind."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import KernelUnavailableError
from ligerprof.kernels import KERNEL_NAMES, KernelShape, apply, find_kernel
from ligerprof.kernels.spec import load_entry
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.kernel_check.check import CallBytes
from ligerprof.runs.simulated import simulate_step
from ligerprof.units import MIB
from tests.kernels.models import FAMILIES, fingerprint, tiny_model, train_once
from tests.kernels.oracle import relative_error, run
from tests.kernels.test_memory import LLAMA_1B, launches_left_out, measure, problem, requested_bytes, stated
from tests.sampling import sampled

pytest.importorskip("liger_kernel")

# fp32 math on both sides, in another order
TOLERANCE = 1e-5


@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_liger_computes_what_the_reference_does(name: str, device: torch.device) -> None:
    kernel = find_kernel(name, "liger")
    if kernel.unavailable_reason(device.type) is not None:
        pytest.skip(str(kernel.unavailable_reason(device.type)))
    shape = dataclasses.replace(LLAMA_1B, tokens=22, sequences=2, hidden=64, intermediate=96, vocab=509, heads=4)
    adapt, inputs = problem(name, dataclasses.replace(shape, activation_bytes=4, parameter_bytes=4), device.type)

    def on_copies(entry: Any) -> Any:
        # Liger writes over its inputs
        return lambda *given: adapt(entry)(*(value.clone() if value.requires_grad else value for value in given))

    ours, theirs = (run(on_copies(load_entry(entry)), inputs) for entry in (kernel.reference, kernel.entry))
    errors = [relative_error(value, right) for value, right in zip(theirs, ours, strict=True)]
    assert max(errors) < TOLERANCE, errors


def test_logits_with_gaps_do_not_become_their_own_gradient(device: torch.device) -> None:
    kernel = find_kernel("ce", "liger")
    given = [torch.randn(33, 5, device=device).t().requires_grad_(), torch.arange(5, device=device)]
    theirs, right = (run(load_entry(entry), given) for entry in (kernel.entry, kernel.reference))
    assert max(relative_error(*pair) for pair in zip(theirs, right, strict=True)) < TOLERANCE


BYTES = {
    "llama-1b": LLAMA_1B,
    "one-sequence": dataclasses.replace(LLAMA_1B, tokens=1024, sequences=1),
    "fp32": dataclasses.replace(LLAMA_1B, activation_bytes=4, parameter_bytes=4),
    "frozen": dataclasses.replace(LLAMA_1B, weight_requires_grad=False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", BYTES)
@pytest.mark.parametrize("name", ["swiglu", "geglu", "rms", "layernorm", "flce"])
def test_stated_bytes_are_what_the_gpus_allocator_is_asked_for(name: str, case: str) -> None:
    """Up to the workspaces of torch's reductions."""
    shape = BYTES[case]
    memory = stated(name, shape, "liger")
    adapt, inputs = problem(name, shape, "cuda")
    function = adapt(load_entry(find_kernel(name, "liger").entry))
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        start_bytes = requested_bytes("current")
        output = function(*inputs)
        forward_bytes = requested_bytes("peak") - start_bytes
        output.backward(torch.ones_like(output))
        for value in inputs:
            value.grad = None
        del output
    stated_bytes = memory.output_bytes + memory.saved_bytes + memory.forward_gradient_bytes
    assert forward_bytes == pytest.approx(stated_bytes + memory.forward_temporary_bytes, abs=64 * 1024)


@pytest.mark.parametrize("case", BYTES)
@pytest.mark.parametrize("name", ["rms", "layernorm", "swiglu", "geglu"])
def test_stated_bytes_on_fake_tensors(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # without a GPU, Liger assumes one multiprocessor
    shape: KernelShape = dataclasses.replace(BYTES[case], sm_count=1)
    kernel = find_kernel(name, "liger")
    with launches_left_out(monkeypatch):
        adapt, inputs = problem(name, shape, "cpu")
        measured = measure(adapt(load_entry(kernel.entry)), inputs)
    assert measured == CallBytes.stated(stated(kernel.name, shape, "liger"))


@sampled("family", [name for name in FAMILIES if name != "gpt2"], every=3)
def test_undo_takes_back_what_liger_changed(family: str) -> None:
    model, functional = tiny_model(family), nn.functional.cross_entropy
    before = fingerprint(model)
    kernels = "rope+flce" if family == "mistral" else "rope+ce"
    with apply(model, kernels, provider="liger", device_kind="simulated"):
        assert fingerprint(model) != before or nn.functional.cross_entropy is not functional
    assert fingerprint(model) == before
    assert nn.functional.cross_entropy is functional


def test_mixed_with_other_providers(device: torch.device) -> None:
    model = tiny_model("llama", device=device)
    before, (loss, grads) = fingerprint(model), train_once(model)
    with apply(model, "rope:liger+rms:ligerprof+swiglu:torch+flce:liger"):
        mixed_loss, mixed_grads = train_once(model)
    assert mixed_loss == pytest.approx(loss, rel=TOLERANCE)
    assert max(relative_error(mixed_grads[name], grads[name]) for name in grads) < TOLERANCE
    assert fingerprint(model) == before


@sampled("kernels", ["rope:liger+rms+swiglu+flce:liger", "rms:liger+swiglu:liger+flce", "ce+rms:liger"], every=3)
def test_a_mixed_step_is_estimated_as_it_is_simulated(kernels: str) -> None:
    recipe = TrainingRecipe(
        model="tiny", batch=4, seq=512, precision="bf16", liger=kernels, alloc_conf="expandable_segments:True"
    )
    simulated = simulate_step(recipe, record=False).peak_bytes
    assert abs(estimate(recipe).peak_bytes - simulated) <= max(0.01 * simulated, MIB)


def test_ligers_losses_train_the_same(device: torch.device) -> None:
    model = tiny_model("llama", device=device)
    loss, grads = train_once(model)
    with apply(model, "rope+flce", provider="liger"):
        liger_loss, liger_grads = train_once(model)
    assert liger_loss == pytest.approx(loss, rel=TOLERANCE)
    assert max(relative_error(liger_grads[name], grads[name]) for name in grads) < TOLERANCE


def test_what_liger_cannot_do_is_refused_and_leaves_the_model_alone() -> None:
    for family, kernels, reason in (
        ("gpt2", "layernorm", "cannot patch 'gpt2' models"),
        ("mistral", "ce", "has no ce for mistral"),
    ):
        model = tiny_model(family)
        before = fingerprint(model)
        with pytest.raises(KernelUnavailableError, match=reason):
            apply(model, kernels, provider="liger", device_kind="simulated")
        assert fingerprint(model) == before
