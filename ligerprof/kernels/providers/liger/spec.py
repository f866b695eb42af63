"""The memory of liger-kernel's kernels, read from the source of version 0.8.5."""

import importlib.util
from collections.abc import Callable, Mapping

from ligerprof.kernels.device import triton_unavailable_reason
from ligerprof.kernels.linear_cross_entropy.plan import lean_chunk_tokens
from ligerprof.kernels.providers.liger.model_types import (
    fuses_experts,
    unpatched_mlps,
    unpatched_norms,
    unpatched_reason,
)
from ligerprof.kernels.selection import inapplicable_reason
from ligerprof.kernels.spec import KernelMemory, KernelShape, KernelSpec
from ligerprof.models import ModelSpec
from ligerprof.torch_memory.dtypes import FP32_BYTES, INDEX_BYTES

PROVIDER = "liger"
_FUNCTIONS = "ligerprof.kernels.providers.liger.functions"
# of our references
_FOLDERS = {"rms": "norm", "layernorm": "norm", "swiglu": "gated", "geglu": "gated"}
_FOLDERS |= {"rope": "rope", "ce": "cross_entropy", "flce": "linear_cross_entropy"}
_INTERPRETABLE = ("rope", "ce", "flce")


def unavailable_reason(device_kind: str) -> str | None:
    """Why liger-kernel's kernels cannot run on a device of this kind, or None."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed (pip install liger-kernel)"
    return triton_unavailable_reason(device_kind)


def _compiled_only_reason(device_kind: str) -> str | None:
    """The same for kernels that call methods on float arguments, which are Python floats in the interpreter."""
    if (reason := unavailable_reason(device_kind)) is None and device_kind == "cpu":
        return "Triton's interpreter cannot run this liger-kernel kernel; a GPU is required"
    return reason


def _rms(shape: KernelShape) -> KernelMemory:
    """As Liger patches Llama: the gradient overwrites the output's; one row of partial sums per multiprocessor."""
    return KernelMemory(
        kept_inputs=("x", "weight"),
        output_bytes=shape.tokens * shape.hidden * shape.activation_bytes,
        saved_bytes=shape.tokens * FP32_BYTES,
        backward_gradient_bytes=shape.hidden * shape.parameter_bytes if shape.weight_requires_grad else 0,
        backward_temporary_bytes=_sums_bytes(shape, slabs=1),
    )


def _layernorm(shape: KernelShape) -> KernelMemory:
    output_bytes = shape.tokens * shape.hidden * shape.activation_bytes
    return KernelMemory(
        kept_inputs=("x", "weight", "bias"),
        output_bytes=output_bytes,
        saved_bytes=2 * shape.tokens * FP32_BYTES,
        backward_gradient_bytes=output_bytes
        + (2 * shape.hidden * shape.parameter_bytes if shape.weight_requires_grad else 0),
        backward_temporary_bytes=_sums_bytes(shape, slabs=2),
    )


def _sums_bytes(shape: KernelShape, *, slabs: int) -> int:
    """Partial sums, and their fp32 total if the weight is narrower."""
    if not shape.weight_requires_grad:
        return 0
    row_bytes = shape.hidden * FP32_BYTES
    total_bytes = row_bytes if shape.parameter_bytes != FP32_BYTES else 0
    return slabs * shape.sm_count * row_bytes + total_bytes


def _gated(shape: KernelShape) -> KernelMemory:
    """Backward overwrites gate and up with their gradients."""
    return KernelMemory(
        kept_inputs=("gate", "up"), output_bytes=shape.tokens * shape.intermediate * shape.activation_bytes
    )


def _rope(shape: KernelShape) -> KernelMemory:
    """Forward rotates in place; backward copies attention's gradients first, because they are not contiguous."""
    elements = shape.tokens * (shape.heads + shape.kv_heads) * shape.head_dim
    return KernelMemory(kept_inputs=("cos", "sin"), backward_gradient_bytes=elements * shape.activation_bytes)


def _ce(shape: KernelShape) -> KernelMemory:
    """Transformers casts the logits up; the gradient overwrites that copy and is cast back in backward."""
    logits = shape.tokens * shape.vocab
    upcast = shape.product_bytes != FP32_BYTES
    # losses, a mask of labels, the labels times the mask, and their minimum and maximum
    checks_bytes = shape.tokens * (FP32_BYTES + 1 + INDEX_BYTES) + INDEX_BYTES
    return KernelMemory(
        kept_inputs=() if upcast else ("logits",),
        output_bytes=FP32_BYTES,
        saved_bytes=logits * FP32_BYTES if upcast else 0,
        forward_temporary_bytes=_labels_bytes(shape) + checks_bytes - FP32_BYTES,
        backward_gradient_bytes=logits * shape.product_bytes if upcast else 0,
        backward_temporary_bytes=FP32_BYTES,
    )


def _labels_bytes(shape: KernelShape) -> int:
    """Shifted labels; a single sequence keeps its padded copy."""
    return (shape.tokens + (1 if shape.sequences == 1 else 0)) * INDEX_BYTES


def _flce(shape: KernelShape) -> KernelMemory:
    """Chunks of logits as large as the hidden states; under autocast, each chunk casts the weight again."""
    hidden_elements, weight_elements = shape.tokens * shape.hidden, shape.vocab * shape.hidden
    chunk = lean_chunk_tokens(tokens=shape.tokens, hidden=shape.hidden, vocab=shape.vocab)
    logits_bytes = workspace_bytes = chunk * shape.vocab * shape.product_bytes
    if shape.parameter_bytes != shape.product_bytes:
        # a trained weight's gradient is made next to the cast weight
        workspace_bytes += (2 if shape.weight_requires_grad else 1) * weight_elements * shape.product_bytes
    if shape.product_bytes == FP32_BYTES and shape.weight_requires_grad:
        # in fp32, each chunk's gradient of the weight is a separate tensor
        workspace_bytes += weight_elements * FP32_BYTES
    losses_bytes = shape.tokens * (FP32_BYTES + 1)
    return KernelMemory(
        output_bytes=FP32_BYTES,
        forward_temporary_bytes=workspace_bytes + losses_bytes + _labels_bytes(shape) - FP32_BYTES,
        workspace_bytes=logits_bytes,
        forward_gradient_bytes=hidden_elements * shape.activation_bytes + shape.head_gradient_bytes,
        backward_temporary_bytes=FP32_BYTES,
    )


_LEFT: Mapping[str, Callable[[ModelSpec], tuple[str, ...]]] = {"rms": unpatched_norms, "swiglu": unpatched_mlps}


def _spec(name: str, title: str, function: str, memory: Callable[[KernelShape], KernelMemory]) -> KernelSpec:
    return KernelSpec(
        name=name,
        provider=PROVIDER,
        title=f"liger-kernel's {title}",
        entry=f"{_FUNCTIONS}:{function}",
        reference=f"ligerprof.kernels.{_FOLDERS[name]}.reference:{function}",
        slot=name,
        memory=memory,
        applies=lambda spec: inapplicable_reason(name, spec) or unpatched_reason(spec.architecture.model_type, name),
        unavailable_reason=unavailable_reason if name in _INTERPRETABLE else _compiled_only_reason,
        leaves=_LEFT.get(name, lambda _spec: ()),
        fuses_experts=fuses_experts if name == "swiglu" else lambda _spec: False,
    )


SPECS = (
    _spec("rope", "rotary embedding, in place", "apply_rope", _rope),
    _spec("rms", "RMSNorm", "rms_norm", _rms),
    _spec("swiglu", "SwiGLU, backward in place", "swiglu", _gated),
    _spec("geglu", "GeGLU, backward in place", "geglu", _gated),
    _spec("layernorm", "LayerNorm", "layer_norm", _layernorm),
    _spec("ce", "cross-entropy, in place", "cross_entropy", _ce),
    _spec("flce", "fused linear cross-entropy", "fused_linear_cross_entropy", _flce),
)
