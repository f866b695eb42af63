"""What a file's way of packing sequences means for a recipe: one packed row, full rows, or padded ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligerprof.recipe.categories import Attention
from ligerprof.recipe.configs.settings import Lacking, Packing

_FULL = "packed micro-batches are full"
# share of a row that its last document leaves free
_PADDING = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """Values of recipe options, and what they assume in one sentence."""

    options: Mapping[str, Any]
    assumed: str


def packed_rows(kind: Packing, attention: str | None, batch: int, *, slides: bool) -> PackedRows | Lacking:
    """The options for a way of packing, or what recipes lack for it.

    Flash attention takes the sequences of a micro-batch as one row. Other kernels keep its rows apart, and a row
    that is alone is the same as one packed row.

    Args:
        attention: the word of `--attention`, None for its default.
        batch: rows of a micro-batch.
        slides: whether the model's attention has a sliding window.
    """
    if attention != Attention.FLASH:
        if kind is Packing.PADDED:
            share = f"padded by {_PADDING:.0%}"
            return PackedRows(
                options={"packing": False, "padding": _PADDING},
                assumed=f"packed rows are {share}, and their documents see each other: the file sets no attention",
            )
        if kind is Packing.VARLEN and not slides:
            return Lacking(what="packing with torch's varlen attention (sdpa_varlen)")
        if kind is Packing.MASK or (kind in (Packing.ROWS, Packing.VARLEN) and batch > 1):
            rows = " of several rows" if kind is not Packing.MASK else ""
            return Lacking(what=f"packing{rows} without flash attention")
    # the only sequence of a micro-batch stays one document
    alone = kind is Packing.PADDING_FREE and batch == 1
    return PackedRows(options={"packing": kind is not Packing.PLAIN and not alone}, assumed=_FULL)
