"""The study's cells as one table: Llama-3.2-1B on 24 GB, what each kernel gives, and the Liger paper's Llama-3-8B.

The study of 2024 trained under DeepSpeed ZeRO-3 with everything offloaded on an RTX 4090, with
transformers 4.45 and liger-kernel; its two sweeps are the first two parts here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.runs.sweep.borders import Axis
from ligerprof.runs.sweep.grid import Grid
from ligerprof.units import GIB

# 24 GB less what the CUDA context takes
MEMORY_LIMIT_BYTES = 47 * GIB // 2
BATCHES = (1, 4, 8, 16, 32, 64, 96, 112)
SEQUENCES = (512, 1024, 2048, 4096, 8192, 12288, 16384, 24576)
SWEEP_BATCH, SWEEP_SEQ = 4, 1024
# the batches whose peaks the study explains role by role
EXPLAINED_BATCHES = (1, 4, 8)
ABLATION_BATCH = 8
PAPER_SEQ = 512
OURS, LIGER = PROVIDERS = "ligerprof", "liger"

_TIMES: Mapping[str, tuple[Any, ...]] = {"warmup": (1,), "repeats": (2,)}
_ZERO: Mapping[str, tuple[Any, ...]] = {
    "model": ("llama3.2-1b",),
    "engine": ("deepspeed",),
    "precision": ("mixed-fp16",),
    "zero": (3,),
    "offload": ("all",),
    "memory_limit_bytes": (MEMORY_LIMIT_BYTES,),
    **_TIMES,
}
_NONE: Mapping[str, Any] = {"liger": "none"}
_SETS = (_NONE, {"liger": "no-flce"}, {"liger": "all"}, {"liger": "all", "provider": LIGER})
SINGLE_KERNELS = ("rope", "rms", "swiglu", "ce", "flce")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Some cells of the study with one question.

    Attributes:
        question: what they answer.
        axis: whose border is searched after the grid, or None.
    """

    name: str
    question: str
    grid: Grid
    axis: Axis | None = None


PARTS = (
    Part(
        name="batch",
        question="What does a larger batch take, and where does memory end?",
        grid=Grid(options={**_ZERO, "batch": BATCHES, "seq": (SWEEP_SEQ,)}, variants=_SETS),
    ),
    Part(
        name="seq",
        question="What does a longer sequence take, and where does memory end?",
        grid=Grid(options={**_ZERO, "batch": (SWEEP_BATCH,), "seq": SEQUENCES}, variants=_SETS),
    ),
    Part(
        name="loss",
        question="What did transformers' loss of 2024 take?",
        grid=Grid(options={**_ZERO, "batch": EXPLAINED_BATCHES, "seq": (SWEEP_SEQ,), "loss": ("hf", "hf-4.45")}),
    ),
    Part(
        name="loss-seq",
        question="Did two thousand tokens fit with it?",
        grid=Grid(options={**_ZERO, "batch": (SWEEP_BATCH,), "seq": (2048,), "loss": ("hf-4.45",)}),
    ),
    Part(
        name="ablation",
        question="What does each kernel give alone?",
        grid=Grid(
            options={**_ZERO, "batch": (ABLATION_BATCH,), "seq": (SWEEP_SEQ,)},
            variants=(_NONE, *({"liger": name} for name in SINGLE_KERNELS), *_SETS[1:3]),
        ),
    ),
    Part(
        name="batch-border",
        question="What is the largest batch without kernels?",
        grid=Grid(options={**_ZERO, "batch": (8,), "seq": (SWEEP_SEQ,)}),
        axis="batch",
    ),
    Part(
        name="seq-border",
        question="What is the longest sequence without kernels?",
        grid=Grid(options={**_ZERO, "batch": (SWEEP_BATCH,), "seq": (2048,)}),
        axis="seq",
    ),
    Part(
        name="paper",
        question="What do all kernels give Llama-3-8B in bf16?",
        grid=Grid(
            options={
                **_TIMES,
                "model": ("llama3-8b",),
                "precision": ("bf16",),
                "batch": (16, 32, 64, 96, 128),
                "seq": (PAPER_SEQ,),
            },
            variants=(_NONE, {"liger": "all"}),
        ),
    ),
)


def select_parts(only: Iterable[str]) -> tuple[Part, ...]:
    """Parts by name, in the study's order; all where none is named.

    Raises:
        RecipeError: a name that no part has.
    """
    names = tuple(only)
    known = [part.name for part in PARTS]
    if unknown := [name for name in names if name not in known]:
        raise RecipeError(f"the study has no part {unknown[0]!r}. Known: {', '.join(known)}.")
    return tuple(part for part in PARTS if not names or part.name in names)


def select_providers(words: Iterable[str]) -> tuple[str, ...]:
    """Whose kernels are run.

    Raises:
        RecipeError: a provider that the study has no cells of.
    """
    names = tuple(words)
    if unknown := [name for name in names if name not in PROVIDERS]:
        raise RecipeError(f"the study has no cells of provider {unknown[0]!r}. Known: {', '.join(PROVIDERS)}.")
    return names


def adapt(part: Part, *, device: str, memory_limit_bytes: int | None, providers: tuple[str, ...]) -> Part:
    """A part on a device, under another limit where it has one, with the kernels of some providers alone.

    Args:
        memory_limit_bytes: None keeps the study's.
        providers: of the kernels; steps without kernels always stay.
    """
    grid = part.grid
    options = {**grid.options, "device": (device,)}
    if memory_limit_bytes is not None and "memory_limit_bytes" in options:
        options["memory_limit_bytes"] = (memory_limit_bytes,)
    variants = tuple(
        variant
        for variant in grid.variants
        if variant.get("liger", "none") == "none" or variant.get("provider", OURS) in providers
    )
    return replace(part, grid=Grid(options=options, variants=variants))
