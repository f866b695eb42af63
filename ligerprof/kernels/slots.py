"""The kernel slots: the operations of a model that a kernel can replace, one row each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ligerprof.models.architecture import Feature


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
