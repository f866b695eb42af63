"""The peak with a fused linear cross-entropy: no logits, but the kernel's workspace and gradients in forward."""

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.suggestions.case import Case, Edit
from ligerprof.errors import LigerprofError
from ligerprof.kernels.registry import find_kernel
from ligerprof.kernels.spec import KernelMemory, KernelShape
from ligerprof.models.architectures import ARCHITECTURES
from ligerprof.recipe.categories import Attention, Precision
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.trace import Int64s
from ligerprof.torch_memory.dtypes import FP32_BYTES, HALF_BYTES, INDEX_BYTES

if TYPE_CHECKING:
    from ligerprof.models.spec import ModelSpec
    from ligerprof.recipe.training import TrainingRecipe

LOSS_ROLES = (Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES)
# bytes per element of logits (possibly cast up), hidden states and weights, with autocast and without
_AUTOCAST_WIDTHS = ((2, 4, 4), (4, 4, 4), (2, 2, 4), (4, 2, 4))
_WIDTHS = ((2, 2, 2), (4, 2, 2), (4, 4, 4))
# the head's gradient, the embedding's, and their sum
_TIED_GRADIENTS = 3
# the first steps differ from each other, later ones do not
_LEARNED_SPANS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LossShape:
    """The sizes of a linear cross-entropy.

    Attributes:
        product_bytes: bytes per element of the logits.
        activation_bytes: bytes per element of the hidden states.
        parameter_bytes: bytes per element of the head's weight.
    """

    tokens: int
    hidden: int
    vocab: int
    product_bytes: int
    activation_bytes: int
    parameter_bytes: int

    @property
    def head_bytes(self) -> int:
        """Bytes of the head's weight."""
        return self.vocab * self.hidden * self.parameter_bytes

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states."""
        return self.tokens * self.hidden * self.activation_bytes


def without_logits(case: Case, provider: str) -> Edit | None:
    """Remove logits and the loss's temporary tensors; add what the provider's kernel allocates."""
    edit = case.without(*LOSS_ROLES)
    backwards = case.backwards
    starts_of_backward = [start for start, _ in backwards]
    known: dict[int, LossShape | None] = {}
    for head, end in heads_of_passes(case):
        size_bytes = int(case.sizes([head])[0])
        if size_bytes not in known:
            known[size_bytes] = find_loss_shape(case, head)
        shape = known[size_bytes]
        if shape is None:
            return None
        following = bisect_left(starts_of_backward, end)
        backward = backwards[following] if following < len(backwards) else None
        event = int(case.replayed.allocated_by[head])
        _add_kernel(case, edit, shape, provider, event, backward)
        if shape.product_bytes != shape.parameter_bytes:
            # the kernel makes its own copy of the head's weight
            casts = case.book.blocks(Role.WEIGHT_CASTS)
            of_head = casts[case.sizes(casts) == shape.vocab * shape.hidden * shape.product_bytes]
            edit.remove(case.allocated_within(of_head, event - 10, event + 1))
    return edit if known else None


def loss_shapes(case: Case) -> Iterator[LossShape]:
    """The sizes of each forward phase's linear cross-entropy, as far as they are known."""
    for head, _ in heads_of_passes(case):
        shape = find_loss_shape(case, head)
        if shape is not None:
            yield shape


def heads_of_passes(case: Case) -> Iterator[tuple[int, int]]:
    """The logits of each forward phase, and the end of that phase."""
    spans = case.spans_of_phase(Phase.FORWARD)
    if not len(case.in_training(Role.LOGITS, Role.CE_TEMPORARIES)):
        # where the optimizer step has the peak, there are none then
        for _, end in spans[:_LEARNED_SPANS]:
            case.book.learn(end)
    logits = case.in_training(Role.LOGITS, Role.CE_TEMPORARIES)
    bounds = np.searchsorted(logits, np.searchsorted(case.replayed.allocated_by, np.array(spans).reshape(-1, 2)))
    all_sizes = case.sizes(logits)
    for (first, last), (_, end) in zip(bounds.tolist(), spans, strict=True):
        if first < last:
            sizes = all_sizes[first:last]
            yield int(logits[first + np.argmax(4 * sizes >= sizes.max())]), end


def find_loss_shape(case: Case, logits: int) -> LossShape | None:
    """Sizes that fit the logits, the layers' outputs, the weights and the labels; None if nothing fits."""
    replayed = case.replayed
    event = int(replayed.allocated_by[logits])
    hidden_bytes = _hidden_bytes(case, event)
    if not hidden_bytes:
        return None
    logits_bytes = int(replayed.requested_bytes[logits])
    live = set(replayed.requested_bytes[replayed.live_at(event)].tolist())
    indices = {size // INDEX_BYTES for size in live if size % INDEX_BYTES == 0}
    autocast = len(case.book.live(event, Role.WEIGHT_CASTS)) > 0
    weights = set(case.sizes(case.book.live(event, Role.PARAMETERS, Role.COMMUNICATION)).tolist())
    for weight_bytes, widths in product(sorted(weights, reverse=True), _AUTOCAST_WIDTHS if autocast else _WIDTHS):
        shape = _shape(logits_bytes, hidden_bytes, weight_bytes, widths, autocast=autocast)
        upcast = shape is not None and widths[0] > shape.product_bytes
        if shape is not None and shape.tokens in indices and (not upcast or _has_product(case, shape, event)):
            return shape
    return None


def _has_product(case: Case, shape: LossShape, event: int) -> bool:
    """Whether logits were made, shortly before or after an event, in the precision of the product that makes them."""
    near = case.replayed.requested_bytes[slice(*np.searchsorted(case.replayed.allocated_by, (event - 20, event + 20)))]
    return bool((near == shape.tokens * shape.vocab * shape.product_bytes).any())


def _shape(
    logits_bytes: int, hidden_bytes: int, weight_bytes: int, widths: tuple[int, int, int], *, autocast: bool
) -> LossShape | None:
    """Tokens, hidden elements and vocabulary whose pairwise products are the three sizes."""
    pairs = zip((logits_bytes, hidden_bytes, weight_bytes), widths, strict=True)
    if any(size % width for size, width in pairs):
        return None
    logits, hidden_states, weight = logits_bytes // widths[0], hidden_bytes // widths[1], weight_bytes // widths[2]
    tokens = math.isqrt(logits * hidden_states // weight)
    if not tokens or tokens * tokens * weight != logits * hidden_states or logits % tokens or hidden_states % tokens:
        return None
    hidden, vocab = hidden_states // tokens, logits // tokens
    if hidden * vocab != weight or vocab <= hidden:
        return None
    return LossShape(
        tokens=tokens,
        hidden=hidden,
        vocab=vocab,
        product_bytes=HALF_BYTES if autocast else widths[2],
        activation_bytes=widths[1],
        parameter_bytes=widths[2],
    )


def _hidden_bytes(case: Case, event: int) -> int:
    """Bytes of the last layer's output before an event, or of the inputs that checkpointing keeps; 0 if unknown."""
    passes = case.passes
    place = int(np.searchsorted(passes.first, event)) - 1
    if place >= 0 and passes.output[place] >= 0:
        return int(case.sizes(passes.output[[place]])[0])
    checkpoints = case.sizes(case.book.live(event, Role.CHECKPOINTS))
    if not len(checkpoints):
        return 0
    values, counts = np.unique(checkpoints, return_counts=True)
    return int(values[np.argmax(counts)])


def _add_kernel(
    case: Case, edit: Edit, shape: LossShape, provider: str, event: int, backward: tuple[int, int] | None
) -> None:
    """Add the kernel's tensors: from the loss in forward until backward makes the same gradients."""
    gradients = _of_size(case, shape.head_bytes, backward)
    gradient = _event_of_first(case, gradients)
    hidden_gradient = _event_of_first(case, _of_size(case, shape.hidden_bytes, backward))
    memory = kernel_memory(shape, provider, weight_requires_grad=backward is None or gradient is not None)
    head_bytes = shape.head_bytes if backward is None or gradient is not None else 0
    start, end = np.array([event + 1]), case.replayed.last_moment + 1
    for size_bytes, made in ((head_bytes, gradient), (memory.forward_gradient_bytes - head_bytes, hidden_gradient)):
        edit.hold(size_bytes, start, np.array([end if made is None else made + 1]))
    if _is_tied(case, shape, gradients, event):
        _sum_in_place(case, edit, gradients)
    edit.spike(start, np.array([memory.output_bytes + memory.saved_bytes + memory.forward_temporary_bytes]))


# all steps have one shape
@lru_cache(maxsize=100)
def kernel_memory(
    shape: LossShape, provider: str, *, weight_requires_grad: bool, returns: tuple[str, ...] = ()
) -> KernelMemory:
    """What the provider's kernel allocates; `returns` are further results of it."""
    kernel = find_kernel("flce", provider)
    assert kernel.memory is not None
    return kernel.memory(
        KernelShape(
            tokens=shape.tokens,
            sequences=1,
            hidden=shape.hidden,
            vocab=shape.vocab,
            intermediate=0,
            heads=0,
            kv_heads=0,
            head_dim=0,
            activation_bytes=shape.activation_bytes,
            parameter_bytes=shape.parameter_bytes,
            compute_bytes=shape.product_bytes,
            weight_requires_grad=weight_requires_grad,
            loss_returns=returns,
        )
    )


def _is_tied(case: Case, shape: LossShape, gradients: Int64s, event: int) -> bool:
    """Whether head and embedding share a weight; the gradient of the logits may be as large as theirs, too."""
    weights = case.sizes(case.book.live(event, Role.PARAMETERS))
    return len(gradients) >= _TIED_GRADIENTS and weights.tolist().count(shape.head_bytes) <= 1


def _sum_in_place(case: Case, edit: Edit, gradients: Int64s) -> None:
    """Drop the sum of the gradients of a weight that head and embedding share.

    The product's gradient is a transposed view, to which autograd cannot add in place; the kernel's is not
    (torch/csrc/autograd/input_buffer.cpp, `accumulate`).
    """
    first, total = gradients[:1], gradients[_TIED_GRADIENTS - 1 : _TIED_GRADIENTS]
    edit.remove(total)
    edit.hold(case.replayed.block_bytes[total], edit.stops(first), edit.stops(total))


def _of_size(case: Case, size_bytes: int, span: tuple[int, int] | None) -> Int64s:
    """Blocks of a size that a span allocates."""
    if span is None:
        return np.empty(0, dtype=np.int64)
    first, last = np.searchsorted(case.replayed.allocated_by, span)
    return first + np.flatnonzero(case.replayed.requested_bytes[first:last] == size_bytes)


def _event_of_first(case: Case, blocks: Int64s) -> int | None:
    return int(case.replayed.allocated_by[blocks[0]]) if len(blocks) else None


# functions that return the label's log-probability, as TRL's `selective_log_softmax`
_FUNCTIONS = r":\w*(?:selective_log_softmax|log_?probs?|logps)(?:_\w+)?$"
_NORMALIZERS = frozenset({"log_softmax_int", "_log_softmax", "logsumexp"})
_CHOICES = frozenset({"gather", "gather_backward"})
_NODES = (re.compile(r"LogSoftmax|Logsumexp"), re.compile(r"^Gather"))


def takes_log_probabilities(case: Case) -> bool:
    """Whether a loss picks each label's log-probability, rather than torch's cross-entropy or a divergence."""
    sites = case.whole.call_sites.sites
    operators = frozenset().union(*(site.stack.operators for site in sites))
    has_operators = bool(operators & _NORMALIZERS and operators & _CHOICES)
    has_nodes = all(any(node.search(site.node) for site in sites) for node in _NODES)
    return has_operators or has_nodes or case.program.has_call(_FUNCTIONS)


def with_linear_log_probs(case: Case) -> Edit | None:
    """Remove logits and the loss's temporary tensors; add what the kernel allocates in forward and in backward.

    Where the recording does not show the head's sizes, the kernel counts as large as the largest of these tensors: it
    computes the logits of fewer tokens, in 16 bits if the products are.
    """
    edit, backwards = case.without(*LOSS_ROLES), case.backwards
    starts = [start for start, _ in backwards]
    spikes = []
    for head, end in heads_of_passes(case):
        shape = find_loss_shape(case, head)
        size_bytes = int(case.sizes([head])[0])
        forward_bytes = backward_bytes = size_bytes
        if shape is not None:
            memory = kernel_memory(shape, "ligerprof", weight_requires_grad=True, returns=("lse",))
            forward_bytes = memory.output_bytes + memory.forward_temporary_bytes
            backward_bytes = memory.backward_gradient_bytes + memory.backward_temporary_bytes
        spikes.append((int(case.replayed.allocated_by[head]) + 1, forward_bytes))
        following = bisect_left(starts, end)
        if following < len(starts):
            spikes.append((starts[following] + 1, backward_bytes))
    if not spikes:
        return None
    edit.spike(*np.array(spikes, dtype=np.int64).T)
    return edit


# sizes of a head, the most common first
_HEAD_DIMS = (64, 128, 96, 80, 256, 32, 16)
_AUTOCASTS = r"torch/amp/autocast_mode\.py:decorate_autocast$"
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
    largest = case.sizes(case.blocks_from(frames.EAGER_CALL)).max(initial=0)
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
                attention=Attention.EAGER if case.program.has_call(frames.EAGER_CALL) else Attention.SDPA,
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
    return case.program.has_call(frames.EAGER_CALL) or _precision(case, shape) is Precision.FP32


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
    other_mixer = row.mixer is not None and row.mixer.kind != "convolution"
    if row.mlp.experts is not None or row.attention.latent or other_mixer:
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
