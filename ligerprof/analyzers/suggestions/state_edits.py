"""The effect of changes to weights and optimizer states: their precision, their place, and which of them train."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.phases import phase_code
from ligerprof.analyzers.suggestions.case import Case, Edit, Framework, frees_of_saved, last_before
from ligerprof.analyzers.suggestions.edits import input_of, interrupted_passes
from ligerprof.analyzers.suggestions.fused_loss import LossShape, find_recipe, loss_shapes
from ligerprof.errors import LigerprofError
from ligerprof.recipe.categories import Precision
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.trace import Int64s
from ligerprof.torch_memory.allocator.settings import MIN_BLOCK_BYTES
from ligerprof.torch_memory.dtypes import FP32_BYTES
from ligerprof.torch_memory.low_bit import eight_bit_state_sizes
from ligerprof.torch_memory.optimizers import SMALLEST_PAGED

if TYPE_CHECKING:
    from ligerprof.analyzers.estimate.kept import KeptBytes
    from ligerprof.recipe.training import TrainingRecipe

LORA_RANK = 16
# peft's layer calls a dropout module; so do the simulation's layer over quantized weights, and the fused loss
ADAPTER_DROPOUT = (
    r"modules/dropout\.py:forward\n(?:\S*torch/nn/modules/module\.py:\w+\n)*"
    r"\S*(?:peft/tuners/lora/|simulated/low_bit\.py:forward|patching/heads\.py:_factors)"
)
_SAVED_ROLES = (Role.ACTIVATIONS, Role.ATTENTION_TEMPORARIES)
# their setting for 16-bit weights also ends autocast
_ENDS_AUTOCAST = (Framework.LIGERPROF, Framework.LLAMA_FACTORY, Framework.LIGHTNING)
_CACHE_UPDATE = r"transformers/cache_utils\.py:update$"
_TRAINED_ROLES = (Role.GRADIENTS, Role.OPTIMIZER_STATES, Role.OPTIMIZER_TEMPORARIES)
_TRAINING_STATES = (Role.PARAMETERS, Role.GRADIENTS, Role.OPTIMIZER_STATES, Role.OPTIMIZER_TEMPORARIES)


def parameter_width(case: Case) -> int | None:
    """Bytes per element of the weights; None if the recording does not show them.

    Autocast copies only fp32 weights. Without autocast, the sizes of the logits, the hidden states and the head's
    weight determine it.
    """
    if len(case.book.blocks(Role.WEIGHT_CASTS)):
        return FP32_BYTES
    shape = next(loss_shapes(case), None)
    return None if shape is None else shape.parameter_bytes


def with_half_precision_weights(case: Case) -> Edit:
    """Halve fp32 weights, their gradients and optimizer states, and remove autocast's copies.

    Activations change as well, which is computed for known models only: those that have the precision of the weights
    shrink, and autocast casts others again.
    """
    edit = case.without(Role.WEIGHT_CASTS)
    _ = case.gradients
    blocks = case.in_training(*_TRAINING_STATES, *([Role.COMMUNICATION] if case.program.engine else []))
    edit.resize(blocks[case.sizes(blocks) > MIN_BLOCK_BYTES], 2)
    recipe = known_recipe(case)
    if recipe is not None:
        precision = Precision.BF16 if case.program.loop in _ENDS_AUTOCAST else Precision.BF16_AMP
        keep_as(case, edit, dataclasses.replace(recipe, precision=precision), without=(Role.WEIGHT_CASTS,))
        # keys and values in fp32 that a program keeps with the model's outputs
        kept, spec = case.blocks_from(_CACHE_UPDATE), recipe.spec
        edit.resize(kept[case.sizes(kept) == recipe.tokens * spec.kv_heads * spec.head_dim * FP32_BYTES], 2)
    case.divide_request(edit, 2, *_TRAINING_STATES)
    return edit


# of the bytes of all weights, the part whose sizes may be of one model alone, such as buffers
_UNPAIRED_SHARE = 0.01


def with_half_precision_reference(case: Case) -> Edit | None:
    """Halve the weights of a model that has each weight of another one in twice the bytes: a reference in fp32.

    Sizes alone tell the models apart: each weight of the policy has a partner of exactly twice its size.
    """
    weights = case.in_training(Role.PARAMETERS)
    weights = weights[case.sizes(weights) > MIN_BLOCK_BYTES]
    order = np.argsort(case.sizes(weights), kind="stable")
    sizes, counts = np.unique(case.sizes(weights), return_counts=True)
    policy: dict[int, int] = {}
    doubled: list[int] = []
    start = unpaired_bytes = 0
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        pairs = min(count, policy.get(size // 2, 0) if size % 2 == 0 else 0)
        unpaired_bytes += size * count
        if pairs:
            policy[size // 2] -= pairs
            doubled += weights[order[start : start + pairs]].tolist()
            unpaired_bytes -= pairs * (size // 2 + size)
        policy[size] = count - pairs
        start += count
    if not doubled or unpaired_bytes > _UNPAIRED_SHARE * int(case.sizes(weights).sum()):
        return None
    return case.edit().resize(np.array(sorted(doubled), dtype=np.int64), 2)


def with_eight_bit_states(case: Case) -> Edit | None:
    """Replace Adam's moments by 8-bit ones with a scale for each block, and remove the step's temporary tensors."""
    width = parameter_width(case)
    if width is None:
        return None
    edit = case.without(Role.OPTIMIZER_TEMPORARIES)
    moments = case.in_training(Role.OPTIMIZER_STATES)
    sizes, size_of = np.unique(case.sizes(moments), return_inverse=True)
    smaller = [sum(eight_bit_state_sizes(size // width)) // 2 for size in sizes.tolist()]
    edit.set_size(moments, _rounded(np.array(smaller, dtype=np.int64))[size_of])
    case.divide_request(edit, width, Role.OPTIMIZER_STATES)
    return edit


def with_paged_states(case: Case) -> Edit:
    """Remove Adam's moments, except small ones, and the step's temporary tensors."""
    edit = case.without(Role.OPTIMIZER_TEMPORARIES)
    moments = case.in_training(Role.OPTIMIZER_STATES)
    edit.remove(moments[case.sizes(moments) >= SMALLEST_PAGED * FP32_BYTES])
    case.divide_request(edit, 0, Role.OPTIMIZER_STATES)
    return edit


def with_lora(case: Case) -> Edit | None:
    """Train adapters in place of the weights, which keep no gradients and optimizer states."""
    shape = next(loss_shapes(case), None)
    if shape is None or not len(case.passes):
        return None
    matrices = _layer_matrices(case, shape)
    if not len(matrices):
        return None
    other_sides = case.sizes(matrices) // shape.parameter_bytes // shape.hidden
    edit = _train_adapters(case, LORA_RANK * FP32_BYTES * int((shape.hidden + other_sides).sum()))
    if not len(case.book.blocks(Role.WEIGHT_CASTS)):
        at_best = case.edit()
        at_best.add(edit)
        _add_adapter_inputs(case, at_best, shape, other_sides, divisor=_LEAST_ADDED)
        if at_best.highest(case.window, case.request)[0] >= case.edit().highest(case.window, case.request)[0]:
            return None
        _add_adapter_inputs(case, edit, shape, other_sides)
    return _with_known_adapters(case) or edit


def without_adapter_dropout(case: Case) -> Edit:
    """Remove the masks of adapters' dropout, of one byte per element; torch allocates each before the dropped input."""
    blocks = case.blocks_from(ADAPTER_DROPOUT)
    sizes = case.sizes(blocks)
    masks = blocks[:-1][(sizes[1:] == 2 * sizes[:-1]) | (sizes[1:] == FP32_BYTES * sizes[:-1])]
    return case.edit().remove(masks)


def _with_known_adapters(case: Case) -> Edit | None:
    """All that adapters change, if the model is known."""
    recipe = known_recipe(case)
    changed = None if recipe is None else _with_adapters(recipe)
    if changed is None:
        return None
    from ligerprof.analyzers.estimate.lora import adapter_weights

    edit = _train_adapters(case, sum(weight.size_bytes for _, weight in adapter_weights(changed)))
    keep_as(case, edit, changed)
    return edit


def computes_lora(case: Case) -> bool:
    """Whether all that adapters change is computed, and not only what they save at least."""
    recipe = known_recipe(case)
    return recipe is not None and _with_adapters(recipe) is not None


def _with_adapters(recipe: "TrainingRecipe") -> "TrainingRecipe | None":
    """The recipe with adapters; None if it has no layers that the estimate gives any."""
    from ligerprof.analyzers.estimate.lora import adapter_weights

    try:
        changed = dataclasses.replace(recipe, lora=LORA_RANK)
        return changed if any(adapter_weights(changed)) else None
    except LigerprofError:
        return None


def _train_adapters(case: Case, adapters_bytes: int) -> Edit:
    """Add adapters; their gradients and optimizer states come and go as those of the weights did."""
    gradients, edit = case.gradients, case.edit()
    trained = np.append(gradients, case.in_training(Role.OPTIMIZER_STATES, Role.OPTIMIZER_TEMPORARIES))
    start = int(case.passes.first[0])
    weights_bytes = case.book.bytes_at(start, Role.PARAMETERS)
    edit.set_size(trained, case.replayed.block_bytes[trained] * min(adapters_bytes, weights_bytes) // weights_bytes)
    edit.hold(adapters_bytes, np.array([start]), np.array([case.replayed.last_moment + 1]))
    case.divide_request(edit, 0, *_TRAINED_ROLES)
    return edit


def _layer_matrices(case: Case, shape: LossShape) -> Int64s:
    """Weights of linear layers: as many columns or rows as the hidden states, not of the vocabulary."""
    weights = case.in_training(Role.PARAMETERS)
    elements = case.sizes(weights) // shape.parameter_bytes
    is_matrix = (elements % shape.hidden == 0) & (elements > shape.hidden) & (elements != shape.vocab * shape.hidden)
    return weights[is_matrix]


def _add_adapter_inputs(case: Case, edit: Edit, shape: LossShape, other_sides: Int64s, *, divisor: int = 1) -> None:
    """Add the fp32 copy of its input that each adapter keeps: peft casts it to the adapter's dtype.

    Under autocast, each linear layer keeps a 16-bit copy with and without adapters. The widest matrices of a layer are
    those of its MLP; the last one reads the wide side.
    """
    passes = case.passes
    layers = max(1, round(np.count_nonzero(other_sides == other_sides.max()) / _MLP_MATRICES))
    inputs = shape.tokens * FP32_BYTES // divisor * (len(other_sides) // layers * shape.hidden + int(other_sides.max()))
    kept = passes.backward_last >= 0
    starts, stops = passes.end[kept] + 1, passes.backward_last[kept] + 1
    if case.program.checkpoints:
        starts = passes.recompute[kept] + 1
    edit.hold(inputs, starts, np.maximum(starts, stops))


# gate, up and down
_MLP_MATRICES = 3
# the 16-bit inputs that frozen layers no longer keep are less than half of the fp32 copies
_LEAST_ADDED = 2


def _rounded(sizes: Int64s) -> Int64s:
    return -(-sizes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def without_earlier_models(case: Case) -> Edit | None:
    """Free earlier models, and the states of their optimizers, when the build of the last one begins."""
    found = case.attribution.program.earlier_models
    blocks = np.flatnonzero(found.blocks)
    blocks = blocks[~np.isin(blocks, case.book.blocks(Role.LIBRARY_WORKSPACE, Role.COMMUNICATION))]
    return case.edit().end(blocks, np.full(len(blocks), found.since + 1)) if len(blocks) else None


def with_saved_tensors_on_host(case: Case) -> Edit | None:
    """End what backward needs when the layer that saved it has run, and hold it again while backward uses it.

    With checkpointing, these are the inputs of layers. What the loss and other code outside of layers saves is held to
    the end of the forward pass. Weights that backward copies back are added.
    """
    passes = case.passes
    ran = passes.backward_last >= 0
    if not ran.any():
        return None
    edit, replayed = case.edit(), case.replayed
    if case.program.checkpoints:
        blocks, by = _checkpoints_by_pass(case, case.book.blocks(Role.CHECKPOINTS))
    else:
        candidates = case.book.blocks(*_SAVED_ROLES, Role.WEIGHT_CASTS)
        chosen = np.isin(passes.saved, candidates) & ran[passes.saved_by]
        outputs, readers = _outputs_by_reader(case, candidates)
        blocks, by = np.append(passes.saved[chosen], outputs), np.append(passes.saved_by[chosen], readers)
        _move_others(case, edit, candidates[~np.isin(candidates, blocks)])
    if not len(blocks):
        return None
    sizes, stops = replayed.block_bytes[blocks], edit.stops(blocks)
    is_cast = np.isin(blocks, case.book.blocks(Role.WEIGHT_CASTS))
    span_ends = np.searchsorted(case.attribution.phases.spans, passes.span, "right")
    ends = np.minimum(np.where(is_cast, span_ends[by], passes.end[by]) + 1, stops)
    edit.release(sizes, ends, stops)
    again = np.maximum(ends, passes.recompute[by] + 1)
    edit.hold(sizes, again, stops)
    weights = case.sizes(case.in_training(Role.PARAMETERS))
    if not is_cast.any() and len(weights):
        # backward copies the largest weight back
        starts_and_ends = np.array(case.spans_of_phase(Phase.BACKWARD), dtype=np.int64).reshape(-1, 2).T + 1
        edit.hold(int(weights.max()), *starts_and_ends)
    return edit


def _move_others(case: Case, edit: Edit, blocks: Int64s) -> None:
    """End blocks with their forward phase if backward frees them, and hold them again when it does."""
    replayed, device = case.replayed, case.attribution.device_blocks
    blocks = case.made_in(Phase.FORWARD, blocks[case.end_in_backward(blocks)])
    span_ends = np.searchsorted(device.phases.spans, device.spans[blocks], "right")
    again = last_before(frees_of_saved(device), replayed.freed_by[blocks]) + 1
    ends, stops = span_ends + 1, edit.stops(blocks)
    edit.release(replayed.block_bytes[blocks], np.minimum(ends, stops), stops)
    edit.hold(replayed.block_bytes[blocks], np.maximum(again, np.minimum(ends, stops)), stops)


def _outputs_by_reader(case: Case, blocks: Int64s) -> tuple[Int64s, Int64s]:
    """Blocks that are a layer's output and that the next layer keeps for backward, and the pass of the next layer."""
    passes = case.passes
    readers = 1 + np.flatnonzero((passes.span[1:] == passes.span[:-1]) & (passes.backward_last[1:] >= 0))
    outputs = passes.output[readers - 1]
    freed = case.replayed.freed_by[outputs]
    kept = (outputs >= 0) & np.isin(outputs, blocks) & (freed >= passes.backward_first[readers])
    return outputs[kept], readers[kept]


def _checkpoints_by_pass(case: Case, checkpoints: Int64s) -> tuple[Int64s, Int64s]:
    """Inputs of layers, and the pass that reads each: the first one that ends after it was made."""
    passes, events = case.passes, case.replayed.allocated_by[checkpoints]
    place = np.searchsorted(passes.end, events, "right")
    # a layer's output is made in its own pass
    made_inside = (place < len(passes)) & (passes.first[np.minimum(place, len(passes) - 1)] <= events)
    place = place + made_inside
    known = (place < len(passes)) & (passes.backward_last[np.minimum(place, len(passes) - 1)] >= 0)
    return checkpoints[known], place[known]


_CHECKPOINTING = frames.CHECKPOINT + r":\w+$"


def known_recipe(case: Case) -> "TrainingRecipe | None":
    """The recorded training, if it is one of a model that the estimate covers; see `find_recipe`."""
    return case.once(find_recipe)


def keep_as(case: Case, edit: Edit, changed: "TrainingRecipe", *, without: tuple[Role, ...] = ()) -> None:
    """Hold for backward what a changed recipe keeps, in place of what the recorded one does.

    Args:
        without: roles that the edit has changed already.
    """
    passes, end = case.passes, case.replayed.last_moment + 1
    fewer = case.once(_fewer_bytes, changed, without)
    place = np.arange(len(passes)) - np.searchsorted(passes.span, passes.span)
    layer = np.minimum(place, len(fewer.layers) - 1)
    starts, stops = _backwards(case)
    ran = stops >= 0
    chosen = ran | interrupted_passes(case)
    stops = np.where(ran, stops + 1, end)
    edit.release(fewer.layers[layer[chosen]], passes.end[chosen] + 1, stops[chosen])
    span_ends = np.searchsorted(case.attribution.phases.spans, passes.span, "right")
    edit.release(fewer.casts[layer[chosen]], passes.end[chosen] + 1, span_ends[chosen] + 1)
    edit.release(fewer.recomputed[layer[ran]], starts[ran] + 1, stops[ran])
    first = chosen & (place == 0)
    edit.release(fewer.others, passes.first[first] + 1, stops[first])
    last = chosen & (place == len(fewer.layers) - 1)
    edit.release(fewer.head, passes.end[last] + 1, np.where(ran, starts + 1, end)[last])


def _backwards(case: Case) -> tuple[Int64s, Int64s]:
    """When each layer's backward, its recomputation included, starts and ends; -1 if it did not run.

    With checkpointing, a layer's input lives until then.
    """
    passes = case.passes
    if not case.program.checkpoints:
        return passes.recompute, passes.backward_last
    freed = np.where(passes.output >= 0, case.replayed.freed_by[passes.output], -1)
    same = np.append(False, passes.span[1:] == passes.span[:-1])
    inputs = np.array([input_of(case, place) for place in np.flatnonzero(~same).tolist()], dtype=np.int64)
    stops = np.append(-1, freed[:-1])
    stops[~same] = np.where(inputs >= 0, case.replayed.freed_by[inputs], -1)
    events = case.replayed.allocated_by[case.blocks_from(_CHECKPOINTING)]
    again = events[case.attribution.phases.codes_of(events) == phase_code(Phase.BACKWARD)]
    # the next layer runs backward first
    after = np.where(np.append(same[1:], False), freed, passes.end)
    starts = np.append(again, case.replayed.last_moment)[np.searchsorted(again, after)]
    return np.minimum(starts, stops), np.where(passes.output >= 0, stops, -1)


class _FewerBytes(NamedTuple):
    """Bytes that a changed recipe saves; negative where it keeps more.

    Attributes:
        layers: per layer, from its forward pass to the end of its backward pass.
        casts: autocast's copies of weights that no layer saves, per layer, to the end of the forward phase.
        recomputed: per layer, while it runs backward after it has been recomputed.
        head: what follows the layers.
        others: the embedding, and what layers share.
    """

    layers: Int64s
    casts: Int64s
    recomputed: Int64s
    head: int
    others: int


def _fewer_bytes(case: Case, changed: "TrainingRecipe", without: tuple[Role, ...]) -> _FewerBytes:
    from ligerprof.analyzers.estimate.kept import kept_bytes

    recipe = known_recipe(case)
    assert recipe is not None

    def total(held: Mapping[Role, int]) -> int:
        return sum(size_bytes for role, size_bytes in held.items() if role not in without)

    def totals(kept: "KeptBytes") -> Int64s:
        return np.array([total(held) for held in kept.layers], dtype=np.int64)

    old, new = kept_bytes(recipe), kept_bytes(changed)
    layers = totals(old) - totals(new)
    casts = recomputed = np.zeros_like(layers)
    if Role.WEIGHT_CASTS not in without:
        casts = np.array(old.casts, dtype=np.int64) - np.array(new.casts, dtype=np.int64)
    if recipe.checkpointing:
        again = [kept_bytes(dataclasses.replace(each, checkpointing=False)) for each in (recipe, changed)]
        recomputed = totals(again[0]) - totals(again[1]) - layers
    return _FewerBytes(
        layers=layers,
        casts=casts,
        recomputed=recomputed,
        head=total(old.head) - total(new.head),
        others=total(old.others) - total(new.others),
    )
