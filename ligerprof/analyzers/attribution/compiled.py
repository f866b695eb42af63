"""Find the head's outputs in code that torch.compile generated, whose linear layers have no frames of their own."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ligerprof.analyzers.attribution.call_sites import CallSites, Mask
from ligerprof.analyzers.attribution.phases import EventPhases, phase_code
from ligerprof.analyzers.attribution.shapes import Shape, shapes_of
from ligerprof.roles import Phase
from ligerprof.snapshots.distinct import distinct, is_among
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

# inductor pads rows to a multiple of 8 numbers; of a vocabulary, that is less than this share
_PADDED_NUMBERS = 8
_PADDING_SHARE = 256
_INDEX_BYTES = 8
# a gradient may have the dtype of the output or another
_DTYPES = (0.5, 1, 2)
# the gradients of a table that the head shares, or of the table and of the head's own
_FEWEST_GRADIENTS = 2
# all passes of a training loop run the same code, and the first ones show it
_PASSES_TO_SEARCH = 16


class CompiledHeads(NamedTuple):
    """What generated code shows of a head over a vocabulary.

    Attributes:
        outputs: the head's outputs.
        sizes: their sizes and those of their gradients.
        row_bytes: bytes of a row of V 16-bit numbers, 0 if V is unknown.
    """

    outputs: Int64s
    sizes: frozenset[int]
    row_bytes: int


class CompiledPasses:
    """The passes that torch.compile generated.

    The head's output is the largest block of its pass. Its gradient, of the same size except for padding, is the
    evidence: the lines of a library's loss for language models allocated it; or the sizes of a table, its gradients,
    the tokens' indices and their vectors fit together.

    Args:
        tables: sizes that an embedding's table may have.
        weights: sizes of weights.
    """

    def __init__(
        self, replayed: Replay, call_sites: CallSites, phases: EventPhases, *, tables: Int64s, weights: Int64s
    ) -> None:
        self._replayed = replayed
        self._sizes = replayed.requested_bytes
        codes = phases.codes_of(replayed.allocated_by)
        self._spans = phases.spans_of(replayed.allocated_by)
        self._before = (codes != phase_code(Phase.BUILD)) & (codes != phase_code(Phase.OPTIMIZER))
        generated = call_sites.at(lambda site: site.stack.is_generated)
        self._forward = np.flatnonzero(generated & (codes == phase_code(Phase.FORWARD)))
        self._backward = np.flatnonzero(generated & (codes == phase_code(Phase.BACKWARD)))
        self._tables, self._weights = tables, weights

    def heads(self, losses: Mask) -> CompiledHeads:
        """The head's outputs, none without evidence of a head.

        Args:
            losses: blocks of a library's loss for language models.
        """
        largest = np.array(list(self._largest_blocks()), dtype=np.int64)
        gradients = distinct(self._sizes[self._backward])
        of_loss = distinct(self._sizes[self._backward[losses[self._backward]]])
        shape = None if len(of_loss) else self._shape(largest)
        row_bytes = 2 * shape.words if shape else 0
        sizes: set[int] = set()
        for size in set(self._sizes[largest].tolist()):
            alike = _near(size, gradients).tolist()
            by_shape = shape is not None and _has_rows(size, shape.words) and len(alike) > 0
            if by_shape or len(_near(size, of_loss, ratios=_DTYPES)):
                sizes |= {size, *alike}
        return CompiledHeads(largest[is_among(self._sizes[largest], sizes)], frozenset(sizes), row_bytes)

    def _largest_blocks(self) -> Iterator[int]:
        """The last of the largest blocks of each forward pass."""
        for blocks in _by_span(self._forward, self._spans):
            sizes = self._sizes[blocks]
            yield int(blocks[np.flatnonzero(sizes == sizes.max())[-1]])

    def _shape(self, largest: Int64s) -> Shape | None:
        """The shape of some pass's largest block, if it can be a head's output."""
        passes = dict(zip(self._spans[largest].tolist(), largest.tolist(), strict=True))
        for blocks in list(_by_span(self._forward, self._spans))[:_PASSES_TO_SEARCH]:
            head = passes[int(self._spans[blocks[0]])]
            backward = self._next_backward(int(self._spans[head]))
            found = shapes_of(
                int(self._sizes[head]), self._tables, self._sizes[blocks], padding=_PADDED_NUMBERS, casts=True
            )
            for shape in found:
                if self._is_head(shape, head, backward):
                    return shape
        return None

    def _is_head(self, shape: Shape, head: int, backward: Int64s) -> bool:
        table_bytes = shape.words * shape.hidden_bytes
        sizes = self._sizes[backward]
        return (
            shape.hidden_bytes in self._weights
            and len(_near(int(self._sizes[head]), distinct(sizes))) > 0
            and int(((sizes == table_bytes) | (sizes == 2 * table_bytes)).sum()) >= _FEWEST_GRADIENTS
            and self._has_indices(shape.tokens, head)
        )

    def _next_backward(self, span: int) -> Int64s:
        """The blocks of the first backward pass after a span."""
        later = self._backward[self._spans[self._backward] > span]
        return later[self._spans[later] == self._spans[later[0]]] if len(later) else later

    def _has_indices(self, tokens: int, head: int) -> bool:
        """Whether a tensor of one index per token exists when the head runs."""
        replayed, event = self._replayed, self._replayed.allocated_by[head]
        alike = np.flatnonzero(self._before & (self._sizes == tokens * _INDEX_BYTES))
        freed = replayed.freed_by[alike]
        return bool(((replayed.allocated_by[alike] < event) & ((freed < 0) | (freed > event))).any())


def _near(size: int, sizes: Int64s, *, ratios: tuple[float, ...] = (1,)) -> Int64s:
    """Those of the ascending sizes that differ from one size, or a multiple of it, by padding at most."""
    found = []
    for wide in (int(size * ratio) for ratio in ratios):
        margin = wide // _PADDING_SHARE
        start, stop = np.searchsorted(sizes, (wide - margin, wide + margin + 1))
        found.append(sizes[start:stop])
    return np.concatenate(found)


def _has_rows(size: int, words: int) -> bool:
    """Whether a size is that of rows of V 16-bit numbers, padded or not."""
    return any(size % (2 * width) == 0 for width in (words, -(-words // _PADDED_NUMBERS) * _PADDED_NUMBERS))


def _by_span(blocks: Int64s, spans: Int64s) -> Iterator[Int64s]:
    if len(blocks):
        yield from np.split(blocks, np.flatnonzero(np.diff(spans[blocks])) + 1)
