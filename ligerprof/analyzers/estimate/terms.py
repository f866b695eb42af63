"""The headline quantities of an estimate, each the formula a person would write down."""

from collections.abc import Collection

from ligerprof.analyzers.estimate.context import DTYPE_BYTES, FP32_BYTES
from ligerprof.analyzers.estimate.placement import moment_count
from ligerprof.analyzers.estimate.result import Term
from ligerprof.analyzers.estimate.tape import Weight
from ligerprof.analyzers.estimate.zero import zero_copies
from ligerprof.recipe import TrainingRecipe


def static_term(recipe: TrainingRecipe, weights: Collection[Weight]) -> Term:
    """Weights of all parameters; gradients and optimizer states of those that train; on one GPU."""
    elements = sum(item.elements for item in recipe.spec.parameters)
    if recipe.engine == "deepspeed":
        return _zero_term(recipe, elements)
    width = DTYPE_BYTES[recipe.weight_dtype]
    copies = 1 + moment_count(recipe)
    trained_bytes = sum(weight.size_bytes for weight in weights if weight.trainable)
    size_bytes = sum(weight.size_bytes for weight in weights) + copies * trained_bytes
    formula = f"{width * (1 + copies)} P, P = {elements:,}"
    if recipe.lora is not None:
        formula = f"{width} P + {FP32_BYTES * (1 + copies)} A, P = {elements:,}, A = {trained_bytes // FP32_BYTES:,}"
    return Term(name="static", formula=formula, size_bytes=size_bytes)


def _zero_term(recipe: TrainingRecipe, elements: int) -> Term:
    copies = zero_copies(recipe)
    share = f" / {recipe.gpus}" if recipe.gpus > 1 else ""
    parts = [f"{size} P" if whole else f"{size} P{share}" for size, whole in copies if size]
    size_bytes = sum(size * (elements if whole else -(-elements // recipe.gpus)) for size, whole in copies)
    return Term(
        name="static",
        formula=f"{' + '.join(parts) or 'all of it in main memory'}, P = {elements:,}",
        size_bytes=size_bytes,
    )


def checkpoint_term(recipe: TrainingRecipe) -> Term | None:
    """The residual stream at the input of every layer."""
    if not recipe.checkpointing:
        return None
    width = DTYPE_BYTES[recipe.weight_dtype]
    spec = recipe.spec
    size_bytes = recipe.tokens * spec.hidden_size * spec.layers * width
    formula = f"B T H L {width} = {recipe.batch} x {recipe.seq} x {spec.hidden_size} x {spec.layers} x {width}"
    return Term(name="checkpoints", formula=formula, size_bytes=size_bytes)


def logits_term(recipe: TrainingRecipe, planes_bytes: int) -> Term:
    """The planes of tokens times vocabulary that are alive together, in units of one in fp32."""
    spec = recipe.spec
    plane_bytes = recipe.tokens * spec.vocab_size * FP32_BYTES
    if planes_bytes < plane_bytes // 2:
        return Term(name="logits", formula="no plane is whole: the fused loss works in chunks", size_bytes=planes_bytes)
    planes = f"{planes_bytes / plane_bytes:.3g} x B T V 4"
    formula = f"{planes}, B T V 4 = {recipe.batch} x {recipe.seq} x {spec.vocab_size} x 4"
    return Term(name="logits", formula=formula, size_bytes=planes_bytes)
