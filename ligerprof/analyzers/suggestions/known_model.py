"""The training of a known model, read off a recording: the one whose weights and layers are as large as recorded."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import numpy as np

from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.fused_loss import LossShape, loss_shapes
from ligerprof.errors import LigerprofError
from ligerprof.models.architectures import ARCHITECTURES
from ligerprof.recipe.categories import Attention, Precision
from ligerprof.roles import Phase, Role
from ligerprof.torch_memory.dtypes import FP32_BYTES, INDEX_BYTES

if TYPE_CHECKING:
    from ligerprof.models.spec import ModelSpec
    from ligerprof.recipe.training import TrainingRecipe

# sizes of a head, the most common first
_HEAD_DIMS = (64, 128, 96, 80, 256, 32, 16)
_AUTOCASTS = r"torch/amp/autocast_mode\.py:decorate_autocast$"
_EAGER = r":eager_attention_forward$"
# a layer's matrices have fewer widths
_MOST_WIDTHS = 8
# the deepest models have half as many; a hostile file may claim more
_MOST_LAYERS = 256
# the roles of smaller weights are not looked up
_LEAST_ELEMENTS = 2**17
_MOST_CANDIDATES = 40
# of the bytes that layers keep
_LARGEST_DIFFERENCE = 0.03


def find_recipe(case: Case) -> "TrainingRecipe | None":
    """The training that was recorded, as far as its activations depend on it.

    None if no known model has its weights, or if none of those that have keeps as many bytes for backward. With
    checkpointing, layers keep their inputs only, and the size of a matrix of scores has to be recorded.
    """
    shape = next(loss_shapes(case), None)
    if shape is None or not len(case.passes) or case.program.has_adapters:
        return None
    nearest, least = None, _LARGEST_DIFFERENCE
    for recipe in islice(_recipes(case, shape), _MOST_CANDIDATES):
        if case.program.checkpoints and _makes_scores(case, shape) and not _has_scores_of(case, recipe):
            continue
        try:
            off = _difference(case, recipe)
        except LigerprofError:
            # the estimate does not cover it
            continue
        if case.program.checkpoints:
            return recipe
        if off < least:
            nearest, least = recipe, off
        if not off:
            break
    return nearest


def _difference(case: Case, recipe: "TrainingRecipe") -> float:
    """Relative difference between the bytes that layers keep for backward in a recipe and in the recording."""
    from ligerprof.analyzers.estimate.kept import kept_bytes

    layers = kept_bytes(recipe).layers
    estimated_bytes = sum(held[role] for held in layers for role in held if role is not Role.ALLOCATOR_ROUNDING)
    return min(abs(estimated_bytes / recorded_bytes - 1) for recorded_bytes in case.once(_recorded_bytes))


def _has_scores_of(case: Case, recipe: "TrainingRecipe") -> bool:
    """Whether the largest tensor that eager attention makes is the fp32 softmax of a recipe's scores."""
    largest = case.sizes(case.blocks_from(_EAGER)).max(initial=0)
    return bool(largest == recipe.tokens * recipe.seq * recipe.spec.heads * FP32_BYTES)


def _recorded_bytes(case: Case) -> tuple[int, int]:
    """Bytes that the layers of the first forward phase keep for backward, their inputs included.

    The second figure is without what outlives backward, such as keys and values that a program keeps with the outputs.
    """
    passes, freed = case.passes, case.replayed.freed_by
    chosen = passes.span == passes.span[0]
    outputs = passes.output[chosen & (passes.output >= 0)]
    # the output of the last layer is read after the layers, which need not save it
    _, forward_end = case.spans_of_phase(Phase.FORWARD)[0]
    outputs = outputs[(freed[outputs] < 0) | (freed[outputs] > forward_end)]
    kept = np.append(passes.saved[chosen[passes.saved_by]], outputs)
    ends = freed[kept] <= passes.backward_last[chosen].max()
    lasting, ending = case.sizes(kept), case.sizes(kept[ends & (freed[kept] >= 0)])
    return max(1, int(lasting.sum())), max(1, int(ending.sum()))


def _recipes(case: Case, shape: LossShape) -> "Iterator[TrainingRecipe]":
    from ligerprof.recipe.training import TrainingRecipe

    sequences = _sequences(case, shape)
    # not `product`, which makes all models first
    for spec, sequence in ((spec, sequence) for spec in _specs(case, shape) for sequence in sequences):
        try:
            yield TrainingRecipe(
                model=spec,
                batch=shape.tokens // sequence,
                seq=sequence,
                precision=_precision(case, shape),
                attention=Attention.EAGER if case.program.has_call(_EAGER) else Attention.SDPA,
                checkpointing=case.program.checkpoints,
            )
        except LigerprofError:
            continue


def _precision(case: Case, shape: LossShape) -> Precision:
    if len(case.book.blocks(Role.WEIGHT_CASTS)):
        return Precision.AMP
    if shape.parameter_bytes == FP32_BYTES:
        return Precision.FP32
    return Precision.BF16_AMP if case.program.has_call(_AUTOCASTS) else Precision.BF16


def _sequences(case: Case, shape: LossShape) -> list[int]:
    """Possible tokens per sequence, the shortest first: the elements of tensors that may hold positions.

    Without a matrix of scores, layers keep as much whatever the length of a sequence, and one length is enough.
    """
    live = case.replayed.live_at(int(case.passes.end[0]))
    lengths = {size // INDEX_BYTES for size in case.sizes(live).tolist() if size % INDEX_BYTES == 0}
    found = sorted(length for length in lengths if 1 < length <= shape.tokens and shape.tokens % length == 0)
    return found if _makes_scores(case, shape) else [*found, shape.tokens][:1]


def _makes_scores(case: Case, shape: LossShape) -> bool:
    """Whether attention may make a matrix of scores, as it does eagerly, and in fp32 for grouped heads."""
    return case.program.has_call(_EAGER) or _precision(case, shape) is Precision.FP32


def _specs(case: Case, shape: LossShape) -> "Iterator[ModelSpec]":
    """Models with the recorded weights; they differ in the number of heads of query and key."""
    from ligerprof.models.from_config import spec_from_config

    model_types = case.program.model_types & ARCHITECTURES.keys()
    layers = len(case.passes) // len(set(case.passes.span.tolist()))
    if len(model_types) != 1 or not 0 < layers <= _MOST_LAYERS:
        return
    (model_type,) = model_types
    weights = Counter((case.sizes(case.in_training(Role.PARAMETERS)) // shape.parameter_bytes).tolist())
    least = max(_LEAST_ELEMENTS, case.book.least_bytes // shape.parameter_bytes + 1)
    saved = set(case.sizes(case.passes.saved).tolist())
    for config, query, key in _configs(model_type, shape, weights, layers):
        # fused attention saves a number for each token and head
        heads = sorted(_HEAD_DIMS, key=lambda head: shape.tokens * (query // head) * FP32_BYTES not in saved)
        for head in (head for head in heads if query % head == key % head == 0):
            split = {"num_attention_heads": query // head, "num_key_value_heads": key // head, "head_dim": head}
            try:
                spec = spec_from_config({**config, **split}, name=model_type)
            except LigerprofError:
                continue
            if _large(Counter(item.elements for item in spec.parameters), least) != _large(weights, least):
                # however the heads are divided
                break
            yield spec


def _large(counts: Mapping[int, int], least: int) -> dict[int, int]:
    return {elements: count for elements, count in counts.items() if elements >= least}


def _configs(
    model_type: str, shape: LossShape, weights: Counter[int], layers: int
) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Configs of models whose matrices are as wide as recorded ones, with the widths of query and key."""
    row, hidden = ARCHITECTURES[model_type], shape.hidden
    # weights do not show how many experts a token goes through, nor what the kernels of other mixers keep
    if row.mlp.experts is not None or row.attention.latent or row.delta is not None or row.state_space is not None:
        return
    outer = weights[shape.vocab * hidden]
    widths = sorted({size // hidden for size in weights if size % hidden == 0 and size > hidden} - {shape.vocab})
    if not outer or len(widths) > _MOST_WIDTHS:
        return
    # a joint projection is as wide as query, key and value together
    joint = [(both - query) // 2 for both in widths for query in widths if both > query]
    keys = widths if len(row.attention.qkv) > 1 else sorted({*widths, *joint})
    positions = widths if row.positions is not None else [shape.tokens]
    for width, query, key, position in product(widths, widths, keys, positions):
        if key <= query:
            config = {
                "model_type": model_type,
                "hidden_size": hidden,
                "vocab_size": shape.vocab,
                "num_hidden_layers": layers,
                row.mlp.width: width,
                "max_position_embeddings": position,
                "tie_word_embeddings": outer == 1,
            }
            yield config, query, key
