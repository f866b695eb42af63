"""How far the estimate was from measured peaks, by engine: what the rows in `benchmarks/results/` show."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligerprof.recipe.categories import Engine, Offload
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.serialization import select


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Measured steps of an engine, at a ZeRO stage and offload, that the estimate was compared with.

    Attributes:
        steps: number of measured steps.
        worst_error_ratio: the largest |estimated / measured - 1| of their steady peaks, rounded up to 0.01 %.
        source: the file with the steps, in `benchmarks/results/`.
    """

    steps: int
    worst_error_ratio: float
    source: str

    def to_json(self) -> dict[str, Any]:
        """The value of `compared` in the estimate's JSON."""
        return select(self, "steps", "worst_error_ratio", "source")


def _of(steps: int, worst_error_ratio: float, source: str) -> Comparison:
    return Comparison(steps=steps, worst_error_ratio=worst_error_ratio, source=source)


_RANKS, _ZERO = "ranks-h200x2.jsonl", "zero-h200.jsonl"
# with torch alone, without fused kernels: those of the file have changed since
# by engine, ZeRO stage (None for the other engines) and offload; a test computes them from the files
COMPARISONS: Mapping[tuple[Engine, int | None, Offload], Comparison] = {
    (Engine.TORCH, None, Offload.NONE): _of(86, 0.0179, "accuracy-h200.jsonl"),
    (Engine.DDP, None, Offload.NONE): _of(9, 0.0027, _RANKS),
    (Engine.FSDP1, None, Offload.NONE): _of(5, 0.0016, "fsdp1-alone-h200.jsonl"),
    (Engine.FSDP2, None, Offload.NONE): _of(29, 0.0031, _RANKS),
    (Engine.FSDP2, None, Offload.ALL): _of(2, 0.0003, _RANKS),
    (Engine.DEEPSPEED, 0, Offload.NONE): _of(2, 0.0002, _ZERO),
    (Engine.DEEPSPEED, 1, Offload.NONE): _of(6, 0.0004, _ZERO),
    (Engine.DEEPSPEED, 1, Offload.OPTIMIZER): _of(1, 0.0003, _ZERO),
    (Engine.DEEPSPEED, 2, Offload.NONE): _of(7, 0.0004, _ZERO),
    (Engine.DEEPSPEED, 2, Offload.OPTIMIZER): _of(3, 0.0004, _ZERO),
    (Engine.DEEPSPEED, 3, Offload.NONE): _of(7, 0.0038, _ZERO),
    (Engine.DEEPSPEED, 3, Offload.OPTIMIZER): _of(1, 0.0001, _ZERO),
    (Engine.DEEPSPEED, 3, Offload.ALL): _of(5, 0.008, _ZERO),
}


def compared_with(recipe: TrainingRecipe) -> Comparison | None:
    """The measured steps that are closest to a recipe's engine, None if there are none."""
    stage = recipe.zero if recipe.engine is Engine.DEEPSPEED else None
    return COMPARISONS.get((recipe.engine, stage, recipe.offload))
