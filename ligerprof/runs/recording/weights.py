"""Weigh the modules of a training step on this rank: what it holds of each, where weights are split over ranks."""

from typing import Any

from torch import Tensor, nn

from ligerprof.analyzers.explain.ranks import module_kind

# what wrappers add to the names of modules
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def add_weights(module: nn.Module, weights: dict[str, list[int]]) -> None:
    """Add the number of modules of each name, with `*` for each index, and the bytes of their own weights.

    Args:
        module: before it runs, while its weights are split.
        weights: receives `[modules, bytes]` by name.
    """
    for name, part in module.named_modules():
        sizes = [_held_bytes(weight) for weight in part.parameters(recurse=False)]
        if sizes:
            words = (word for word in name.split(".") if word not in _WRAPPERS)
            found = weights.setdefault(module_kind(".".join(words)) or type(part).__name__, [0, 0])
            found[0] += 1
            found[1] += sum(sizes)


def _held_bytes(weight: Any) -> int:
    """The bytes of this rank's part of a DTensor, or of a weight under ZeRO-3."""
    part = getattr(weight, "_local_tensor", getattr(weight, "ds_tensor", weight))
    return int(part.nbytes) if isinstance(part, Tensor) else 0
