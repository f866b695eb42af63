"""The ladder of changes that save memory, cheapest first: the effect of each on a recipe, and its cost."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.kernels.selection import select_kernels
from ligerprof.recipe.categories import Engine, GradSync, Loss, Offload, Optimizer, Precision, ReduceDtype, Wrap
from ligerprof.recipe.training import TrainingRecipe

# the recipes that a change can produce, the smallest change first; or the reason why it does not apply
Outcome = tuple[TrainingRecipe, ...] | str
# what a recipe becomes where it is written, or the reason why it cannot be
Settle = Callable[[TrainingRecipe], TrainingRecipe | str]

_EXPANDABLE = "expandable_segments:True"
# of adapters, peft's examples' choice
_RANK = 16
# tokens of a sequence
_SHORTEST = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One rung.

    Attributes:
        name: name in the JSON.
        title: name in printed tables.
        cost: cost in time or precision, in words.
        free: whether it costs neither, so that a plan never gets cheaper without it.
    """

    name: str
    title: str
    cost: str
    outcome: Callable[[TrainingRecipe], Outcome]
    free: bool = False


def _change(
    name: str, title: str, cost: str, *, free: bool = False
) -> Callable[[Callable[[TrainingRecipe], Outcome]], Change]:
    return lambda outcome: Change(name=name, title=title, cost=cost, outcome=outcome, free=free)


@_change("kernels", "fused kernels", "none: the same computation with different rounding", free=True)
def _fused_kernels(recipe: TrainingRecipe) -> Outcome:
    # TRL computes its loss in tiles, and refuses a fused one
    wanted = "no-flce" if recipe.loss is Loss.TRL_TILED else "all"
    if recipe.selective is not None:
        # rope writes over outputs that selective checkpointing keeps
        wanted = "+".join(name for name in select_kernels(wanted, recipe.spec) if name != "rope")
    if set(recipe.kernels) == set(select_kernels(wanted, recipe.spec)):
        return "all applicable kernels are in use"
    if recipe.loss is Loss.TRL_TILED:
        return (dataclasses.replace(recipe, liger=wanted),)
    # the fused loss replaces the loss that `loss` selects
    return (dataclasses.replace(recipe, liger=wanted, loss=Loss.HF),)


@_change("zero-2", "ZeRO-2", "little: the communication volume of data parallelism", free=True)
def _zero_2(recipe: TrainingRecipe) -> Outcome:
    if recipe.gpus == 1:
        return "needs several GPUs"
    if recipe.engine is Engine.FSDP2:
        return "FSDP2 shards gradients and optimizer states"
    if recipe.engine is not Engine.DEEPSPEED:
        return _with_deepspeed(recipe, zero=2)
    if recipe.zero >= 2:
        return f"ZeRO-{recipe.zero} already partitions gradients"
    return (dataclasses.replace(recipe, zero=2),)


@_change("grad-sync", "gradients sharded at once", "time: gradients are reduced in every micro-batch")
def _grad_sync(recipe: TrainingRecipe) -> Outcome:
    if recipe.engine is not Engine.FSDP2:
        return "only FSDP2 keeps gradients whole between micro-batches"
    if recipe.grad_accum == 1 or recipe.grad_sync is GradSync.EVERY:
        return "every micro-batch reduces its gradients already"
    return (dataclasses.replace(recipe, grad_sync=GradSync.EVERY),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How a framework shards over several GPUs.

    Attributes:
        engine: what the ladder tries first, DeepSpeed or FSDP2.
        wrap: the groups of FSDP2.
        reduce_dtype: of FSDP2 in mixed precision; None for its default.
    """

    engine: Engine = Engine.DEEPSPEED
    wrap: Wrap = Wrap.LAYERS
    reduce_dtype: ReduceDtype | None = None


def _with_fsdp2(recipe: TrainingRecipe, sharding: Sharding) -> Outcome:
    if recipe.engine is Engine.FSDP2:
        return "already enabled"
    if recipe.engine is Engine.DEEPSPEED:
        return "DeepSpeed partitions the states; --sharding fsdp2 takes FSDP2 in its place"
    if recipe.gpus == 1:
        return "needs several GPUs"
    if not recipe.optimizer.row.on_shards:
        return f"{recipe.optimizer} does not work on FSDP2's shards yet"
    # weights in fp32 are gathered in bf16; autocast would keep a copy of each
    mixes = recipe.weight_dtype == "float32" and recipe.autocast == "bfloat16"
    sharded = dataclasses.replace(
        recipe,
        engine=Engine.FSDP2,
        precision=Precision.MIXED if mixes else recipe.precision,
        wrap=sharding.wrap,
        reduce_dtype=sharding.reduce_dtype if mixes else None,
        bucket_view=False,
    )
    return (sharded,)


def _fsdp2(sharding: Sharding) -> Change:
    return Change(
        name="fsdp2",
        title="FSDP2",
        cost="time: weights are gathered in both passes, 1.5 times the communication",
        outcome=lambda recipe: _with_fsdp2(recipe, sharding),
    )


@_change(
    "lora-dropout", "no dropout in adapters", "training: adapters lose this regularization; peft's default has none"
)
def _no_lora_dropout(recipe: TrainingRecipe) -> Outcome:
    if not recipe.lora_dropout:
        return "no adapter has dropout"
    return (dataclasses.replace(recipe, lora_dropout=0.0),)


@_change("checkpointing", "checkpointing", "time: each layer's forward pass runs twice, up to a third more compute")
def _checkpointing(recipe: TrainingRecipe) -> Outcome:
    if recipe.checkpointing and recipe.checkpoint_every == 1 and recipe.selective is None:
        return "already enabled"
    return (dataclasses.replace(recipe, checkpointing=True, checkpoint_every=1, selective=None),)


@_change(
    "mixed-precision",
    "mixed precision",
    "precision: matrix products in 16 bits; weights and moments stay fp32",
)
def _mixed_precision(recipe: TrainingRecipe) -> Outcome:
    if recipe.engine is Engine.FSDP2 and recipe.autocast == "bfloat16" and recipe.weight_dtype == "float32":
        # autocast would keep a copy of every layer's gathered weights
        return (dataclasses.replace(recipe, precision=Precision.MIXED),)
    if recipe.precision is not Precision.FP32:
        return f"precision {recipe.precision} already computes in 16 bits"
    return (dataclasses.replace(recipe, precision=Precision.AMP if _has_bfloat16(recipe) else Precision.AMP_FP16),)


@_change("bf16-weights", "16-bit frozen weights", "precision: weights that do not train are rounded to 16 bits")
def _narrow_frozen_weights(recipe: TrainingRecipe) -> Outcome:
    if not (recipe.lora or recipe.qlora):
        return "all weights train, and 16 bits would lose their small updates"
    if recipe.weight_dtype != "float32":
        return "the weights are in 16 bits already"
    in_float16 = recipe.precision.uses_float16 or not _has_bfloat16(recipe)
    return _tried(recipe, precision=Precision.FP16_AMP if in_float16 else Precision.BF16_AMP)


@_change("zero-3", "ZeRO-3", "time: weights are gathered in both passes, 1.5 times the communication")
def _zero_3(recipe: TrainingRecipe) -> Outcome:
    if recipe.zero == 3:
        return "already enabled"
    if recipe.engine is Engine.FSDP2:
        return "FSDP2 shards the weights"
    if recipe.gpus == 1:
        return "needs several GPUs; offloading enables ZeRO as well"
    if recipe.engine is not Engine.DEEPSPEED:
        return _with_deepspeed(recipe, zero=3)
    return (dataclasses.replace(recipe, zero=3),)


@_change(
    "offload-optimizer",
    "offload the optimizer",
    "time: Adam runs on the CPU; gradients and weights cross PCIe every step",
)
def _offload_optimizer(recipe: TrainingRecipe) -> Outcome:
    if recipe.offload is not Offload.NONE:
        return "the optimizer is already offloaded"
    if recipe.engine is Engine.FSDP2:
        return "FSDP2 offloads everything or nothing"
    return _offloaded(recipe, Offload.OPTIMIZER, max(recipe.zero, 2))


@_change("offload-all", "offload the weights too", "time: weights also cross PCIe in both passes")
def _offload_all(recipe: TrainingRecipe) -> Outcome:
    if recipe.offload.moves_parameters:
        return "the weights are already offloaded"
    if recipe.engine is Engine.FSDP2:
        return (dataclasses.replace(recipe, offload=Offload.ALL),)
    return _offloaded(recipe, Offload.ALL, 3)


@_change("galore", "GaLore", "precision: moments of projected gradients; time: a periodic decomposition")
def _galore(recipe: TrainingRecipe) -> Outcome:
    return _other_optimizer(recipe, Optimizer.GALORE)


@_change("adamw-8bit", "8-bit Adam", "precision: moments in 8 bits with one scale per block")
def _adamw_8bit(recipe: TrainingRecipe) -> Outcome:
    return _other_optimizer(recipe, Optimizer.ADAMW_8BIT)


@_change("bf16", "bf16 weights", "precision: weights, gradients and moments in 16 bits, which lose small updates")
def _bf16(recipe: TrainingRecipe) -> Outcome:
    if recipe.weight_dtype != "float32":
        return "the weights are in 16 bits already"
    if not _has_bfloat16(recipe):
        return f"{recipe.gpu_spec.title} has no bf16"
    return (dataclasses.replace(recipe, precision=Precision.BF16),)


@_change("accumulation", "gradient accumulation", "time: the same sequences per step in more, smaller micro-batches")
def _accumulation(recipe: TrainingRecipe) -> Outcome:
    if recipe.batch == 1:
        return "the micro-batch is 1"
    sizes = [size for size in range(recipe.batch - 1, 0, -1) if recipe.batch % size == 0]
    return tuple(
        dataclasses.replace(recipe, batch=size, grad_accum=recipe.grad_accum * (recipe.batch // size)) for size in sizes
    )


@_change("lora", "LoRA", f"training: only adapters of rank {_RANK} learn")
def _lora(recipe: TrainingRecipe) -> Outcome:
    if recipe.lora or recipe.qlora:
        return "adapters are trained already"
    return _tried(recipe, lora=_RANK)


@_change("qlora", "QLoRA", "training: only adapters learn, over weights in 4 bits")
def _qlora(recipe: TrainingRecipe) -> Outcome:
    if recipe.qlora:
        return "the weights are in 4 bits already"
    if recipe.gpus > 1 or recipe.engine is not Engine.TORCH:
        return "runs on one GPU without an engine"
    return (dataclasses.replace(recipe, lora=None, quantization=None, qlora=recipe.lora or _RANK),)


@_change("sequence", "shorter sequences", "training: longer documents are cut or split")
def _sequence(recipe: TrainingRecipe) -> Outcome:
    sizes = [recipe.seq >> halvings for halvings in range(1, recipe.seq.bit_length())]
    shorter = tuple(dataclasses.replace(recipe, seq=size) for size in sizes if size >= _SHORTEST)
    return shorter or f"sequences have {recipe.seq} tokens"


@_change(
    "expandable-segments",
    "expandable segments",
    "little time: segments grow by driver calls that map memory",
    free=True,
)
def expandable_segments(recipe: TrainingRecipe) -> Outcome:
    """Less fragmentation; not on the ladder, because allocated bytes stay the same."""
    if recipe.alloc_conf and "expandable_segments" in recipe.alloc_conf:
        return f"--alloc-conf sets it: {recipe.alloc_conf}"
    conf = f"{recipe.alloc_conf},{_EXPANDABLE}" if recipe.alloc_conf else _EXPANDABLE
    return (dataclasses.replace(recipe, alloc_conf=conf),)


_UP_TO_ZERO_3 = (
    _zero_2,
    _grad_sync,
    _no_lora_dropout,
    _checkpointing,
    _mixed_precision,
    _narrow_frozen_weights,
    _zero_3,
)
_REST = (
    _accumulation,
    _offload_optimizer,
    _offload_all,
    _galore,
    _adamw_8bit,
    _lora,
    _qlora,
    _sequence,
)


def make_ladder(sharding: Sharding) -> tuple[Change, ...]:
    """The changes, the cheapest first; FSDP2 comes before or after what DeepSpeed would do."""
    fsdp2 = _fsdp2(sharding)
    if sharding.engine is Engine.FSDP2:
        return (_fused_kernels, fsdp2, *_UP_TO_ZERO_3, *_REST)
    return (_fused_kernels, *_UP_TO_ZERO_3, fsdp2, *_REST)


def settled(ladder: Sequence[Change], settle: Settle) -> tuple[Change, ...]:
    """The same changes, with what becomes of their recipes in the place where they are written."""
    return tuple(map(partial(_settled, settle), ladder))


def _settled(settle: Settle, change: Change) -> Change:
    def outcome(recipe: TrainingRecipe) -> Outcome:
        found = change.outcome(recipe)
        if isinstance(found, str):
            return found
        results = tuple(map(settle, found))
        recipes = tuple(each for each in results if not isinstance(each, str))
        return recipes or next(each for each in results if isinstance(each, str))

    return dataclasses.replace(change, outcome=outcome)


LADDER = make_ladder(Sharding())


def same_data(ladder: Sequence[Change]) -> tuple[Change, ...]:
    """The changes that keep batch and sequence as they are asked for."""
    return tuple(change for change in ladder if change.name != _sequence.name)


SAME_DATA = same_data(LADDER)

# tried one by one where no batch fits
NEAREST = (_bf16, _adamw_8bit, _offload_optimizer)


def _tried(recipe: TrainingRecipe, **changes: Any) -> Outcome:
    """The changed recipe, or the conflict of its options."""
    try:
        return (dataclasses.replace(recipe, **changes),)
    except RecipeError as conflict:
        return str(conflict)


def _offloaded(recipe: TrainingRecipe, offload: Offload, zero: int) -> Outcome:
    if not recipe.optimizer.row.is_adam:
        return f"DeepSpeed offloads Adam, not {recipe.optimizer}"
    return _with_deepspeed(recipe, zero=zero, offload=offload, optimizer=Optimizer.DEFAULT)


def _with_deepspeed(recipe: TrainingRecipe, *, zero: int, **changes: Any) -> tuple[TrainingRecipe]:
    in_float16 = recipe.precision.uses_float16 or (recipe.precision is Precision.FP32 and not _has_bfloat16(recipe))
    changed = dataclasses.replace(
        recipe,
        engine=Engine.DEEPSPEED,
        precision=Precision.MIXED_FP16 if in_float16 else Precision.MIXED,
        zero=zero,
        # DDP's
        bucket_view=False,
        grad_sync=GradSync.LAST,
        **changes,
    )
    return (changed,)


def _other_optimizer(recipe: TrainingRecipe, optimizer: Optimizer) -> Outcome:
    if recipe.offload is not Offload.NONE:
        return "the optimizer is offloaded"
    if not recipe.optimizer.row.is_adam:
        return f"replaces Adam, and the recipe uses {recipe.optimizer}"
    return _tried(recipe, optimizer=optimizer)


def _has_bfloat16(recipe: TrainingRecipe) -> bool:
    return recipe.gpu_spec.compute_capability >= (8, 0)
