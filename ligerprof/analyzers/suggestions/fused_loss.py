"""The peak with a fused linear cross-entropy: no logits, but the kernel's workspace and gradients in forward."""

import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.replayed_change import Edit, starts, stops
from ligerprof.kernels.registry import find_kernel
from ligerprof.kernels.spec import KernelMemory, KernelShape
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.trace import Int64s
from ligerprof.torch_memory.dtypes import HALF_BYTES, INDEX_BYTES

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
    tensors = []
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
        tensors.append(case.once(_kernel_tensors, shape, provider, event, backward))
        if shape.product_bytes != shape.parameter_bytes:
            # the kernel makes its own copy of the head's weight
            casts = case.book.blocks(Role.WEIGHT_CASTS)
            of_head = casts[case.sizes(casts) == shape.vocab * shape.hidden * shape.product_bytes]
            edit.remove(case.allocated_within(of_head, event - 10, event + 1))
    if not known:
        return None
    edit.hold(*np.array([lives for each in tensors for lives in each.lives], dtype=np.int64).reshape(-1, 3).T)
    edit.spike(*np.array([each.spike for each in tensors], dtype=np.int64).reshape(-1, 2).T)
    return edit


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


class _KernelTensors(NamedTuple):
    """The tensors of one call of the kernel.

    Attributes:
        lives: bytes, first moment and the moment after the last of each tensor; negative for one that is not made.
        spike: the moment of the call, and bytes that live only then.
    """

    lives: tuple[tuple[int, int, int], ...]
    spike: tuple[int, int]


def _kernel_tensors(
    case: Case, shape: LossShape, provider: str, event: int, backward: tuple[int, int] | None
) -> _KernelTensors:
    """The kernel's tensors: from the loss in forward until backward makes the same gradients."""
    gradients = _of_size(case, shape.head_bytes, backward)
    gradient = _event_of_first(case, gradients)
    hidden_gradient = _event_of_first(case, _of_size(case, shape.hidden_bytes, backward))
    memory = kernel_memory(shape, provider, weight_requires_grad=backward is None or gradient is not None)
    head_bytes = shape.head_bytes if backward is None or gradient is not None else 0
    rest_bytes = memory.forward_gradient_bytes - head_bytes
    end = case.replayed.last_moment + 1
    start = event + 1
    return _KernelTensors(
        lives=(
            (head_bytes, start, end if gradient is None else gradient + 1),
            (rest_bytes, start, end if hidden_gradient is None else hidden_gradient + 1),
            *(_sum_in_place(case, gradients) if _is_tied(case, shape, gradients, event) else ()),
        ),
        spike=(start, memory.output_bytes + memory.saved_bytes + memory.forward_temporary_bytes),
    )


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


def _sum_in_place(case: Case, gradients: Int64s) -> Iterator[tuple[int, int, int]]:
    """Drop the sum of the gradients of a weight that head and embedding share.

    The product's gradient is a transposed view, to which autograd cannot add in place; the kernel's is not
    (torch/csrc/autograd/input_buffer.cpp, `accumulate`).
    """
    both = gradients[[0, _TIED_GRADIENTS - 1]]
    size_bytes = int(case.replayed.block_bytes[both[1]])
    stop_of_first, stop = stops(case.replayed, both).tolist()
    yield -size_bytes, int(starts(case.replayed, both)[1]), stop
    yield size_bytes, stop_of_first, stop


def _of_size(case: Case, size_bytes: int, span: tuple[int, int] | None) -> Int64s:
    """Blocks of a size that a span allocates."""
    if span is None:
        return np.empty(0, dtype=np.int64)
    first, last = np.searchsorted(case.replayed.allocated_by, span)
    found: Int64s = first + np.flatnonzero(case.replayed.requested_bytes[first:last] == size_bytes)
    return found


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
