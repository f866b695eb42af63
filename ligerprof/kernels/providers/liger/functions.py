"""liger-kernel's operations with our signatures, called as in a transformers model that Liger has patched."""

import importlib
import inspect
import logging
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor, nn

from ligerprof.errors import KernelInputError, KernelUnavailableError
from ligerprof.kernels.cross_entropy.reference import next_labels
from ligerprof.kernels.options import PLAIN_LOSS, LossOptions
from ligerprof.models.architecture import Architecture

# it warns of each backend for hardware that is not there
logging.getLogger("liger_kernel.backends").setLevel(logging.ERROR)


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [B, H, T, D] in place.

    Raises:
        KernelInputError: other axes, for which liger-kernel would write outside of them.
    """
    if unsqueeze_dim != 1:
        raise KernelInputError(
            f"rope: liger-kernel takes [B, heads, T, D], not unsqueeze_dim={unsqueeze_dim}. Use another provider."
        )
    from liger_kernel.ops.rope import LigerRopeFunction

    return LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim)  # type: ignore[no-any-return]


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """RMSNorm; its gradient overwrites the gradient of its output."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, eps, offset, "gemma" if offset else "llama")  # type: ignore[no-any-return]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, eps)  # type: ignore[no-any-return]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Silu(gate) * up; backward overwrites both."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)  # type: ignore[no-any-return]


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Gelu(gate) * up with GELU's tanh approximation; backward overwrites both."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(gate, up)  # type: ignore[no-any-return]


def cross_entropy(
    logits: Tensor, labels: Tensor, options: LossOptions = PLAIN_LOSS, num_items: Tensor | float | None = None
) -> Tensor:
    """Cross-entropy over logits cast to fp32; the gradient overwrites the cast copy."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    targets = next_labels(labels, options)
    # of a row with gaps, liger-kernel 0.8.5 makes a copy without `requires_grad`, and returns it as the gradient
    rows = logits.float().contiguous().view(-1, logits.shape[-1])
    loss: Tensor = liger_cross_entropy(rows, targets.view(-1), **_loss_arguments(options, num_items))
    return _divided(loss, targets, options, num_items)


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN_LOSS,
    bias: Tensor | None = None,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Linear layer and cross-entropy in chunks of logits as large as the hidden states."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    targets = next_labels(labels, options)
    loss: Tensor = liger_fused_linear_cross_entropy(
        hidden.view(-1, hidden.shape[-1]), weight, targets.view(-1), bias=bias, **_loss_arguments(options, num_items)
    )
    return _divided(loss, targets, options, num_items)


def _loss_arguments(options: LossOptions, num_items: Tensor | float | None) -> dict[str, Any]:
    if options.logit_scale != 1.0:
        raise KernelUnavailableError("liger-kernel's losses have no logit scale. Use provider ligerprof.")
    summed = num_items is not None and options.reduction == "mean"
    return {
        "ignore_index": options.ignore_index,
        "label_smoothing": options.label_smoothing,
        "lse_square_scale": options.z_loss,
        "softcap": options.softcap,
        "reduction": "sum" if summed else options.reduction,
    }


def _divided(loss: Tensor, targets: Tensor, options: LossOptions, num_items: Tensor | float | None) -> Tensor:
    if options.reduction == "none":
        return loss.view(targets.shape)
    return loss / num_items if num_items is not None and options.reduction == "mean" else loss


# our slot to Liger's flag
_FLAGS = {
    "rope": "rope",
    "rms": "rms_norm",
    "swiglu": "swiglu",
    "geglu": "geglu",
    "layernorm": "layer_norm",
    "ce": "cross_entropy",
    "flce": "fused_linear_cross_entropy",
}


def patch_with_liger(model: Any, row: Architecture, kernels: tuple[str, ...]) -> Callable[[], None]:
    """Run liger-kernel's patcher for the model's architecture with the flags of `kernels` only, and return its undo.

    Liger replaces names in transformers' module and in its classes, and in torch.nn.functional, for the whole process.
    The undo restores those and the model; models built in between keep Liger's classes.

    Raises:
        KernelUnavailableError: Liger has no patcher for the architecture, no flag for a kernel, or one without effect.
    """
    from liger_kernel.transformers import monkey_patch

    patcher: Callable[..., None] | None = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(row.model_type)
    if patcher is None:
        raise KernelUnavailableError(f"liger-kernel cannot patch {row.model_type!r} models. Use provider ligerprof.")
    flags = [name for name in inspect.signature(patcher).parameters if name != "model"]
    for kernel in kernels:
        if _FLAGS[kernel] not in flags:
            raise KernelUnavailableError(f"liger-kernel has no {kernel} for {row.model_type}. Leave {kernel} out.")
    wanted = {_FLAGS[kernel] for kernel in kernels}
    undo = _remember(model, row)
    before = nn.functional.cross_entropy
    try:
        patcher(**{flag: flag in wanted for flag in flags}, model=model)
    except BaseException:
        # it may have replaced some of its names by then
        undo()
        raise
    if "ce" in kernels and nn.functional.cross_entropy is before:
        undo()
        raise KernelUnavailableError(f"liger-kernel's ce for {row.model_type} has no effect. Use flce.")
    return undo


def _remember(model: nn.Module, row: Architecture) -> Callable[[], None]:
    modeling = importlib.import_module(row.modeling_module)
    spaces: list[MutableMapping[str, Any]] = [vars(modeling), vars(nn.functional)]
    spaces.extend(vars(module) for module in model.modules())
    saved = [(space, dict(space)) for space in spaces]
    # the dictionary of a class is read-only
    classes = [(value, dict(vars(value))) for value in vars(modeling).values() if isinstance(value, type)]

    def restore() -> None:
        for space, before in saved:
            for name in [name for name in space if name not in before]:
                del space[name]
            for name, value in before.items():
                if space.get(name) is not value:
                    space[name] = value
        for owner, attributes in classes:
            for name in [name for name in vars(owner) if name not in attributes]:
                delattr(owner, name)
            for name, value in attributes.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)

    return restore
