"""Resolve a `--liger` set to the kernels of an architecture."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ligerprof.errors import RecipeError
from ligerprof.models import ModelSpec
from ligerprof.models.architecture import Feature
from ligerprof.text import short_repr
from ligerprof.words import did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One operation of a model that kernels can replace.

    Attributes:
        name: the word in `--liger`.
        title: what is replaced, for listings.
        feature: what an architecture must have for the slot to apply.
        filler: the function of patching/fill.py that puts a kernel into a model.
        in_all, in_no_flce: whether the sets `all` and `no-flce` contain it.
        with_residual_add: name of the kernel that includes the addition before the operation.
        with_next_linear: name of the kernel that includes the linear layer after the operation.
        varied: what bench's `paper` shapes vary: hidden size (H), tokens (T) or vocabulary (V).
    """

    name: str
    title: str
    feature: Feature
    filler: str
    in_all: bool = True
    in_no_flce: bool = True
    with_residual_add: str | None = None
    with_next_linear: str | None = None
    varied: Literal["H", "T", "V"] = "H"

    @property
    def benched(self) -> tuple[str, ...]:
        """Names of the kernels that `ligerprof bench` measures (runs/bench/operations.py)."""
        return (self.name,) if self.with_residual_add is None else (self.name, self.with_residual_add)

    @property
    def fused_variants(self) -> tuple[str, ...]:
        """Names of kernels that include a neighboring operation, used if the provider has them."""
        return tuple(name for name in (self.with_residual_add, self.with_next_linear) if name is not None)


# in the order in which kernels are listed, patched and printed
_ROWS = (
    Slot(
        name="rope", title="rotary position embedding of queries and keys", feature=Feature.ROTARY, filler="fill_rope"
    ),
    Slot(name="rms", title="RMSNorm", feature=Feature.RMS_NORM, filler="fill_rms", with_residual_add="add_rms"),
    Slot(
        name="swiglu",
        title="the gated MLP's silu(gate) * up",
        feature=Feature.SWIGLU,
        filler="fill_gated",
        with_next_linear="swiglu_linear",
        varied="T",
    ),
    Slot(
        name="geglu",
        title="the gated MLP's gelu(gate) * up",
        feature=Feature.GEGLU,
        filler="fill_gated",
        with_next_linear="geglu_linear",
        varied="T",
    ),
    Slot(name="layernorm", title="LayerNorm", feature=Feature.LAYER_NORM, filler="fill_layernorm"),
    Slot(
        name="ce",
        title="cross-entropy of the logits",
        feature=Feature.LOSS,
        filler="fill_ce",
        in_all=False,
        in_no_flce=False,
        varied="V",
    ),
    Slot(
        name="flce",
        title="output layer and cross-entropy together",
        feature=Feature.LOSS,
        filler="fill_flce",
        in_no_flce=False,
        varied="V",
    ),
)

SLOTS: Mapping[str, Slot] = {slot.name: slot for slot in _ROWS}
KERNEL_NAMES = tuple(SLOTS)


def find_slot(feature: Feature) -> Slot:
    """The slot of a feature other than the loss, which has two."""
    (found,) = (slot for slot in SLOTS.values() if slot.feature == feature)
    return found


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
