"""Which kernels a `--liger` set means for an architecture."""

import re
from collections.abc import Callable, Mapping

from ligerprof.errors import RecipeError
from ligerprof.models import ModelSpec

# the order in which kernels are listed, patched and printed
KERNEL_NAMES = ("rope", "rms", "swiglu", "geglu", "layernorm", "ce", "flce")

# kernels that do more in one call than their slot's own; a provider that has one puts it in wherever the model allows
WIDER_KERNELS: Mapping[str, str] = {"add_rms": "rms", "swiglu_linear": "swiglu", "geglu_linear": "geglu"}

# the study's "all but the fused loss"
_STUDY_NO_FLCE = ("rope", "rms", "swiglu", "geglu", "layernorm")


def inapplicable_reason(name: str, spec: ModelSpec) -> str | None:
    """Why `spec` has no operation that the kernel `name` could replace, or None."""
    has: Mapping[str, bool] = {
        "rope": spec.rotary,
        "rms": spec.norm == "rms",
        "swiglu": spec.mlp == "swiglu",
        "geglu": spec.mlp == "geglu",
        "layernorm": spec.norm == "layer",
        "ce": True,
        "flce": True,
    }
    if has[name]:
        return None
    return f"{spec.name} ({spec.model_type}) has no operation that {name} replaces"


def applies(name: str) -> Callable[[ModelSpec], str | None]:
    """The `applies` of a kernel that fills the slot `name`."""
    return lambda spec: inapplicable_reason(name, spec)


def select_kernels(text: str, spec: ModelSpec) -> tuple[str, ...]:
    """Read a `--liger` set: `none`, `all`, `no-flce`, or names joined by `+` or `,`.

    `all` is every kernel that applies, the fused loss in place of ce.

    Raises:
        RecipeError: an unknown name, a name twice, one that does not apply, or both losses.
    """
    applying = tuple(name for name in KERNEL_NAMES if inapplicable_reason(name, spec) is None)
    word = text.strip().lower()
    if word in ("none", ""):
        return ()
    if word == "all":
        return tuple(name for name in applying if name != "ce")
    if word == "no-flce":
        return tuple(name for name in applying if name in _STUDY_NO_FLCE)
    return _named_kernels(word, spec)


def _named_kernels(word: str, spec: ModelSpec) -> tuple[str, ...]:
    names = [name.strip() for name in re.split(r"[+,]", word)]
    for name in names:
        if name not in KERNEL_NAMES:
            raise RecipeError(
                f"unknown kernel {name!r} in {word!r}. Known: none, all, no-flce, or {', '.join(KERNEL_NAMES)}"
                " joined by '+'."
            )
        if (reason := inapplicable_reason(name, spec)) is not None:
            raise RecipeError(f"{reason}. Leave {name} out.")
    if len(set(names)) != len(names):
        raise RecipeError(f"{word!r} names a kernel twice. Name each once.")
    if "ce" in names and "flce" in names:
        raise RecipeError("ce and flce replace the same loss. Name one of them.")
    return tuple(name for name in KERNEL_NAMES if name in names)
