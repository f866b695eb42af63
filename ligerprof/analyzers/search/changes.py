"""The ladder of changes that save memory, cheapest first: what each does to a recipe, when it cannot, what it costs."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from ligerprof.kernels.selection import select_kernels
from ligerprof.recipe.training import TrainingRecipe

# what a change makes of a recipe, the mildest variant first; or why it changes nothing
Outcome = tuple[TrainingRecipe, ...] | str

_ADAMS = ("adamw-fused", "adamw-foreach", "deepspeed-cpu-adam")
_EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One rung.

    Attributes:
        name: the word in the JSON.
        title: what it is, for a person.
        cost: what it takes in time or precision.
        free: whether it costs neither: no plan is cheaper without it.
    """

    name: str
    title: str
    cost: str
    outcome: Callable[[TrainingRecipe], Outcome]
    free: bool = False


def _fuse_kernels(recipe: TrainingRecipe) -> Outcome:
    if set(recipe.kernels) == set(select_kernels("all", recipe.spec)):
        return "every kernel that applies is in use"
    # the old loss is the very thing that the fused loss replaces
    return (dataclasses.replace(recipe, liger="all", loss="hf"),)


def _share_gradients(recipe: TrainingRecipe) -> Outcome:
    if recipe.gpus == 1:
        return "one GPU has no other to share with"
    if recipe.zero >= 2:
        return f"ZeRO-{recipe.zero} shares them"
    return (dataclasses.replace(recipe, zero=2),)


def _checkpoint(recipe: TrainingRecipe) -> Outcome:
    if recipe.checkpointing:
        return "layers are checkpointed"
    return (dataclasses.replace(recipe, checkpointing=True),)


def _mix_precision(recipe: TrainingRecipe) -> Outcome:
    if recipe.precision != "fp32":
        return f"precision {recipe.precision} computes in 16 bit"
    return (dataclasses.replace(recipe, precision="amp" if _has_bfloat16(recipe) else "amp-fp16"),)


def _share_weights(recipe: TrainingRecipe) -> Outcome:
    if recipe.zero == 3:
        return "ZeRO-3 shares them"
    if recipe.gpus == 1:
        return "one GPU has no other to share with; offloading brings ZeRO along"
    return (dataclasses.replace(recipe, zero=3),)


def _offload_optimizer(recipe: TrainingRecipe) -> Outcome:
    if recipe.offload != "none":
        return "the optimizer is in main memory"
    return _offloaded(recipe, "optimizer", max(recipe.zero, 2))


def _offload_all(recipe: TrainingRecipe) -> Outcome:
    if recipe.offload in ("all", "nvme"):
        return "the weights are in main memory"
    return _offloaded(recipe, "all", 3)


def _offload_to_nvme(recipe: TrainingRecipe) -> Outcome:
    if recipe.offload == "nvme":
        return "weights and optimizer are on the disk"
    return _offloaded(recipe, "nvme", 3, nvme_path=".")


def _offloaded(recipe: TrainingRecipe, offload: str, zero: int, nvme_path: str | None = None) -> Outcome:
    if recipe.optimizer not in _ADAMS:
        return f"the optimizer that DeepSpeed offloads is Adam, not {recipe.optimizer}"
    in_float16 = recipe.precision.endswith("fp16") or (recipe.precision == "fp32" and not _has_bfloat16(recipe))
    changed = dataclasses.replace(
        recipe,
        engine="deepspeed",
        precision="mixed-fp16" if in_float16 else "mixed",
        zero=zero,
        offload=offload,
        nvme_path=nvme_path,
        optimizer="default",
    )
    return (changed,)


def _has_bfloat16(recipe: TrainingRecipe) -> bool:
    return recipe.gpu_spec.compute_capability >= (8, 0)


def _project_gradients(recipe: TrainingRecipe) -> Outcome:
    return _other_optimizer(recipe, "galore")


def _quantize_moments(recipe: TrainingRecipe) -> Outcome:
    return _other_optimizer(recipe, "adamw-8bit")


def _other_optimizer(recipe: TrainingRecipe, optimizer: str) -> Outcome:
    if recipe.offload != "none":
        return "the optimizer has left the GPU"
    if recipe.optimizer not in _ADAMS:
        return f"it stands in for Adam, and the recipe has {recipe.optimizer}"
    return (dataclasses.replace(recipe, optimizer=optimizer),)


def _accumulate(recipe: TrainingRecipe) -> Outcome:
    if recipe.batch == 1:
        return "the batch is 1"
    sizes = [size for size in range(recipe.batch - 1, 0, -1) if recipe.batch % size == 0]
    return tuple(
        dataclasses.replace(recipe, batch=size, grad_accum=recipe.grad_accum * (recipe.batch // size)) for size in sizes
    )


def _expand_segments(recipe: TrainingRecipe) -> Outcome:
    if recipe.alloc_conf and "expandable_segments" in recipe.alloc_conf:
        return f"--alloc-conf decides it: {recipe.alloc_conf}"
    conf = f"{recipe.alloc_conf},{_EXPANDABLE}" if recipe.alloc_conf else _EXPANDABLE
    return (dataclasses.replace(recipe, alloc_conf=conf),)


LADDER: tuple[Change, ...] = (
    Change(
        name="kernels",
        title="fused kernels",
        cost="none: the same mathematics, rounded at other places",
        outcome=_fuse_kernels,
        free=True,
    ),
    Change(
        name="zero-2",
        title="ZeRO-2",
        cost="none to speak of: as much traffic as data parallel has",
        outcome=_share_gradients,
        free=True,
    ),
    Change(
        name="checkpointing",
        title="checkpointing",
        cost="time: every layer's forward pass runs twice, up to a third more compute",
        outcome=_checkpoint,
    ),
    Change(
        name="mixed-precision",
        title="mixed precision",
        cost="precision: products in 16 bit; weights and moments stay fp32",
        outcome=_mix_precision,
    ),
    Change(
        name="zero-3",
        title="ZeRO-3",
        cost="time: weights are gathered in both passes, 1.5 times the traffic",
        outcome=_share_weights,
    ),
    Change(
        name="offload-optimizer",
        title="offload the optimizer",
        cost="time: Adam runs on the CPU; gradients and weights cross the bus every step",
        outcome=_offload_optimizer,
    ),
    Change(
        name="offload-all",
        title="offload the weights too",
        cost="time: weights cross the bus in both passes as well",
        outcome=_offload_all,
    ),
    Change(
        name="galore",
        title="GaLore",
        cost="precision: moments of projected gradients; time: a decomposition now and then",
        outcome=_project_gradients,
    ),
    Change(
        name="adamw-8bit",
        title="8-bit Adam",
        cost="precision: moments in 8 bit with a scale a block",
        outcome=_quantize_moments,
    ),
    Change(
        name="offload-nvme",
        title="offload to NVMe",
        cost="time: weights and moments move at the disk's speed; relieves main memory",
        outcome=_offload_to_nvme,
    ),
    Change(
        name="accumulation",
        title="smaller batch, accumulated",
        cost="time: the same sequences a step in more and smaller passes",
        outcome=_accumulate,
    ),
)

EXPANDABLE_SEGMENTS = Change(
    name="expandable-segments",
    title="expandable segments",
    cost="none in results; segments grow by remapping, which takes driver calls",
    outcome=_expand_segments,
    free=True,
)
