"""Resolve a `--liger` set to the kernels of an architecture."""

import re
from collections.abc import Callable, Mapping

from ligerprof.errors import RecipeError
from ligerprof.kernels.slots import KERNEL_NAMES, SLOTS
from ligerprof.models import ModelSpec
from ligerprof.text import short_repr
from ligerprof.words import did_you_mean


def inapplicable_reason(name: str, spec: ModelSpec) -> str | None:
    """Why `spec` has no operation that the kernel `name` could replace, or None."""
    if SLOTS[name].feature in spec.features:
        return None
    return f"{spec.name} ({spec.model_type}) has no operation that {name} replaces"


def applies(name: str) -> Callable[[ModelSpec], str | None]:
    """The `applies` of a kernel for the slot `name`.

    Raises:
        ValueError: the slot is unknown.
    """
    if name not in SLOTS:
        raise ValueError(f"no slot {short_repr(name)}; known: {', '.join(KERNEL_NAMES)}")
    return lambda spec: inapplicable_reason(name, spec)


def select_kernels(text: str, spec: ModelSpec) -> tuple[str, ...]:
    """The kernels of a `--liger` set, as `select_providers` parses it."""
    return tuple(select_providers(text, "", spec))


def select_providers(text: str, provider: str, spec: ModelSpec) -> dict[str, str]:
    """Parse a `--liger` set: `none`, `all` (with flce instead of ce), `no-flce`, or names joined by `+` or `,`.

    A name may have a provider, as in `rms:liger+flce`.

    Args:
        provider: the provider of the names without one.

    Returns:
        The provider of each kernel, in the order of the slots.

    Raises:
        RecipeError: an unknown name, a name twice, one that does not apply, or both losses.
    """
    applying = tuple(name for name in KERNEL_NAMES if inapplicable_reason(name, spec) is None)
    word = text.strip().lower()
    if word in ("none", ""):
        return {}
    if word == "all":
        return {name: provider for name in applying if SLOTS[name].in_all}
    if word == "no-flce":
        return {name: provider for name in applying if SLOTS[name].in_no_flce}
    return _named_kernels(text.strip(), provider, spec)


def kernel_set_text(providers: Mapping[str, str]) -> str:
    """A `--liger` set that means these kernels of these providers."""
    return "+".join(f"{name}:{provider}" for name, provider in providers.items()) or "none"


def _named_kernels(word: str, provider: str, spec: ModelSpec) -> dict[str, str]:
    given: list[tuple[str, str]] = []
    for part in re.split(r"[+,]", word):
        name, colon, own = (piece.strip() for piece in part.partition(":"))
        if colon and not own:
            raise RecipeError(f"{part.strip()!r} in {word!r} names no provider. Write it as in {name}:torch.")
        given.append((name.lower(), own or provider))
    providers, names = dict(given), [name for name, _ in given]
    for name in names:
        if name not in KERNEL_NAMES:
            raise RecipeError(
                f"unknown kernel {short_repr(name)} in {short_repr(word)}.{did_you_mean(name, KERNEL_NAMES)}"
                f" Known: none, all, no-flce, or {', '.join(KERNEL_NAMES)} joined by '+'."
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
    return {name: providers[name] for name in taken.values()}
