"""The headline terms of an estimate, each in closed form."""

from collections.abc import Collection, Iterator, Mapping

from ligerprof.analyzers.estimate.groups import groups
from ligerprof.analyzers.estimate.lora import adapter_rank
from ligerprof.analyzers.estimate.placement import state_sizes, stored_sizes, trained_tensors
from ligerprof.analyzers.estimate.result import Term
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.analyzers.estimate.zero import zero_copies
from ligerprof.recipe.categories import Engine, GradSync, Offload
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.dtypes import DTYPE_BYTES, FP32_BYTES
from ligerprof.torch_memory.optimizers import OPTIMIZERS, moment_count
from ligerprof.units import format_bytes


def static_term(recipe: TrainingRecipe, weights: Collection[Weight]) -> Term:
    """Weights, and gradients and optimizer states of trainable parameters, on one GPU."""
    if recipe.engine is Engine.DEEPSPEED:
        return _zero_term(recipe, weights)
    if recipe.engine.is_fsdp:
        return _sharded_term(recipe, weights)
    trained_bytes = sum(weight.size_bytes for weight in weights if weight.trainable)
    stored_bytes = sum(sum(weight.stored_sizes) for weight in weights)
    state_bytes, state_text = _states(recipe, weights, trained_bytes)
    return Term(
        name="static",
        formula=_static_formula(recipe, weights, state_text),
        size_bytes=stored_bytes + trained_bytes + state_bytes,
    )


def _states(recipe: TrainingRecipe, weights: Collection[Weight], trained_bytes: int) -> tuple[int, str]:
    """Bytes of the optimizer's moments, and text for moments that are not a multiple of the gradients."""
    row = OPTIMIZERS[recipe.optimizer]
    if row.moments is None:
        size_bytes = sum(state_sizes(recipe, weights))
        return size_bytes, f" + {row.label.format(rank=recipe.galore_rank)} {format_bytes(size_bytes)}"
    return row.moments * trained_bytes, ""


def _static_formula(recipe: TrainingRecipe, weights: Collection[Weight], state_text: str) -> str:
    elements = sum(item.elements for item in recipe.spec.parameters)
    width = DTYPE_BYTES[recipe.weight_dtype]
    copies = 1 if state_text else 1 + moment_count(recipe.optimizer)
    if adapter_rank(recipe) is None:
        return f"{width * (1 + copies)} P{state_text}, P = {elements:,}"
    adapters = sum(weight.elements for weight in weights if weight.is_adapter)
    copied = sum(weight.elements for weight in weights if weight.trainable and not weight.is_adapter)
    quantized = sum(weight.elements for weight in weights if weight.packed_sizes)
    per_weight = {None: "", 4: "0.516 Q", 8: "Q"}[recipe.packed_bits]
    base = f"{width} (P - Q) + {per_weight}" if quantized else f"{width} P"
    names = f"P = {elements:,}, " + (f"Q = {quantized:,}, " if quantized else "") + f"A = {adapters:,}"
    full = f" + {width * (1 + copies)} M" if copied else ""
    names += f", M = {copied:,}" if copied else ""
    return f"{base} + {FP32_BYTES * (1 + copies)} A{full}{state_text}, {names}"


def _zero_term(recipe: TrainingRecipe, weights: Collection[Weight]) -> Term:
    whole = sum(weight.elements for weight in weights)
    trained = sum(weight.elements for weight in weights if weight.trainable)
    share = f" / {recipe.gpus}" if recipe.gpus > 1 else ""
    letter = "P" if trained == whole else "A"
    parts, size_bytes = [], 0
    for (size, is_whole), name, count in zip(
        zero_copies(recipe), ("P", letter, letter), (whole, trained, trained), strict=True
    ):
        if size:
            parts.append(f"{size} {name}" if is_whole else f"{size} {name}{share}")
            size_bytes += size * (count if is_whole else -(-count // recipe.gpus))
    names = f"P = {whole:,}" + ("" if trained == whole else f", A = {trained:,}")
    return Term(
        name="static", formula=f"{' + '.join(parts) or 'all of it in main memory'}, {names}", size_bytes=size_bytes
    )


def _sharded_term(recipe: TrainingRecipe, weights: Collection[Weight]) -> Term:
    """The padded shards of the rank that has most, their gradients, and the states of the shards."""
    if recipe.offload is not Offload.NONE:
        return Term(name="static", formula="all of it in main memory", size_bytes=0)
    trained = [weight for weight in weights if weight.trainable]
    width, moments = DTYPE_BYTES[recipe.weight_dtype], moment_count(recipe.optimizer)
    shards = f" / {recipe.shards}" if recipe.shards > 1 else ""
    whole, part = (sum(weight.elements for weight in items) for items in (weights, trained))
    if whole == part:
        formula = f"{width * (2 + moments)} P{shards}, P = {whole:,}"
    else:
        formula = f"({width} P + {width * (1 + moments)} A){shards}, P = {whole:,}, A = {part:,}"
    stored_bytes = sum(stored_sizes(recipe, weights))
    gradient_bytes = sum(stored_sizes(recipe, trained))
    state_bytes = sum(tensor.size_bytes for tensor in trained_tensors(recipe, weights)) * moments
    return Term(name="static", formula=formula, size_bytes=stored_bytes + gradient_bytes + state_bytes)


def buffer_terms(recipe: TrainingRecipe, weights: Mapping[str, Weight]) -> Iterator[Term]:
    """What several GPUs add in a backward pass: FSDP2's buffers of a layer and of other groups, or DDP's buckets."""
    if recipe.engine is Engine.DDP and not recipe.bucket_view:
        size_bytes = sum(weight.size_bytes for weight in weights.values() if weight.trainable)
        yield Term(name="buckets", formula="as large as all gradients", size_bytes=size_bytes)
    if not recipe.engine.is_fsdp:
        return
    if recipe.grad_accum > 1 and recipe.grad_sync is GradSync.LAST:
        width = DTYPE_BYTES[recipe.reduction_dtype]
        trained = sum(weight.elements for weight in weights.values() if weight.trainable)
        formula = f"{width} E, E = {trained:,} trained, until the last micro-batch"
        yield Term(name="whole gradients", formula=formula, size_bytes=width * trained)
    for group in groups(recipe, weights):
        in_layer = group.modules == (0,)
        other_layer = isinstance(group.modules[0], int) and not in_layer
        if other_layer or not any(weight.trainable for weight in group.weights):
            continue
        sizes, gathered = group.sizes, DTYPE_BYTES[recipe.gathered_dtype]
        trained = sum(weight.elements for weight in group.weights if weight.trainable)
        gradient_bytes = sum(weight.size_bytes for weight in group.weights if weight.trainable)
        whole = sum(weight.elements for weight in group.weights)
        if in_layer:
            # its own parameters, and the gathering of the layer before
            name, copies, held_bytes = "layer's backward", f"2 x {gathered} U + ", 2 * sizes.gather_bytes
        else:
            name, copies, held_bytes = f"{group.modules[-1]}'s reduction", "", 0
        letter = "U" if trained == whole else "A"
        formula = f"{copies}({gathered} + {sizes.reduce_bytes}) {letter}, U = {whole:,}"
        yield Term(
            name=name,
            formula=formula if trained == whole else f"{formula}, A = {trained:,}",
            size_bytes=held_bytes + gradient_bytes + sizes.reduce_input_bytes,
        )


def checkpoint_term(recipe: TrainingRecipe) -> Term | None:
    """The residual stream, or all of several, at the input of each checkpointed layer."""
    if not recipe.checkpointing:
        return None
    width = DTYPE_BYTES[recipe.gathered_dtype]
    spec = recipe.spec
    layers = sum(recipe.checkpoints_layer(index) for index in range(spec.layers))
    size_bytes = recipe.tokens * spec.hidden_size * layers * width
    symbols, numbers = "B T H L", f"{recipe.batch} x {recipe.seq} x {spec.hidden_size} x {layers}"
    if spec.architecture.streams is not None:
        # autocast leaves them in fp32
        width, streams = FP32_BYTES if recipe.autocast else width, spec.setting(spec.architecture.streams)
        size_bytes = recipe.tokens * spec.hidden_size * layers * width * streams
        symbols, numbers = f"{symbols} N", f"{numbers} x {streams}"
    formula = f"{symbols} {width} = {numbers} x {width}"
    return Term(name="checkpoints", formula=formula, size_bytes=size_bytes)


def logits_term(recipe: TrainingRecipe, logits_bytes: int) -> Term:
    """The [T, V] logits tensors that are live together, in units of one fp32 tensor."""
    spec = recipe.spec
    tensor_bytes = recipe.tokens * spec.vocab_size * FP32_BYTES
    if logits_bytes < tensor_bytes // 2:
        return Term(
            name="logits", formula="no whole logits tensor: the fused loss works in chunks", size_bytes=logits_bytes
        )
    count = f"{logits_bytes / tensor_bytes:.3g} x B T V 4"
    formula = f"{count}, B T V 4 = {recipe.batch} x {recipe.seq} x {spec.vocab_size} x 4"
    return Term(name="logits", formula=formula, size_bytes=logits_bytes)
