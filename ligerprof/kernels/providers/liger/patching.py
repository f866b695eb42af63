"""Let liger-kernel patch a model with its own patcher, and undo the changes."""

import importlib
import inspect
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import nn

from ligerprof.errors import KernelUnavailableError
from ligerprof.models.architecture import Architecture

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
