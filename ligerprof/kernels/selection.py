"""Resolve a `--liger` set to the kernels of an architecture."""

import re
from collections.abc import Callable

from ligerprof.errors import RecipeError
from ligerprof.kernels.slots import KERNEL_NAMES, SLOTS
from ligerprof.models import ModelSpec


def inapplicable_reason(name: str, spec: ModelSpec) -> str | None:
    """Why `spec` has no operation that the kernel `name` could replace, or None."""
    if SLOTS[name].feature in spec.features:
        return None
    return f"{spec.name} ({spec.model_type}) has no operation that {name} replaces"


def applies(name: str) -> Callable[[ModelSpec], str | None]:
    """The `applies` of a kernel for the slot `name`."""
    return lambda spec: inapplicable_reason(name, spec)


def select_kernels(text: str, spec: ModelSpec) -> tuple[str, ...]:
    """Parse a `--liger` set: `none`, `all` (with flce instead of ce), `no-flce`, or names joined by `+` or `,`.

    Raises:
        RecipeError: an unknown name, a name twice, one that does not apply, or both losses.
    """
    applying = tuple(name for name in KERNEL_NAMES if inapplicable_reason(name, spec) is None)
    word = text.strip().lower()
    if word in ("none", ""):
        return ()
    if word == "all":
        return tuple(name for name in applying if SLOTS[name].in_all)
    if word == "no-flce":
        return tuple(name for name in applying if SLOTS[name].in_no_flce)
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
    taken: dict[str, str] = {}
    for name in (name for name in KERNEL_NAMES if name in names):
        other = taken.setdefault(SLOTS[name].feature, name)
        if other != name:
            raise RecipeError(f"{other} and {name} replace the same {SLOTS[name].feature}. Name one of them.")
    return tuple(taken.values())
