"""Find the loss over a vocabulary: the sizes of its [T, V] tensors, for T tokens and V words, and the head's calls."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice, product
from typing import NamedTuple

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.gradients import DDP_BUCKET
from ligerprof.analyzers.attribution.phases import BlockFinder, DeviceBlocks
from ligerprof.analyzers.attribution.stacks import CallSite, CallSites, PythonCall
from ligerprof.models.architectures import is_head, is_token_embedding
from ligerprof.roles import Phase
from ligerprof.snapshots.trace import Flags, Int64s, number_pairs, runs

# bytes of a number of the table, of the looked-up tokens, and of the head's output
_WIDTHS = np.array(list(product((2, 4), repeat=3)), dtype=np.int64)
_LEAST_HIDDEN_SIZE = 8
# models have far fewer tables, and batches far fewer lengths; each pair of sizes takes time
_MOST_SIZES = 64


class Shape(NamedTuple):
    """The shape of a head's output, and the bytes of a vector of D numbers in the table's dtype."""

    tokens: int
    words: int
    hidden_bytes: int


def shapes_of(
    output_bytes: int, tables: Int64s, looked_up: Int64s, *, padding: int = 1, casts: bool = False
) -> list[Shape]:
    """Every shape for which a table, looked-up tokens and the output fit together; of many sizes, the largest count.

    Sizes of layers are products of small numbers, and many of them fit by chance. A vocabulary has more words than a
    vector has numbers, except one of characters, whose logits take little memory.

    Args:
        padding: rows of the output may be padded to a multiple of this many numbers.
        casts: whether looked-up tokens may have another dtype than the table.
    """
    tables, looked_up = (np.unique(sizes)[-_MOST_SIZES:, None] for sizes in (tables, looked_up))
    widths = _WIDTHS if casts else _WIDTHS[_WIDTHS[:, 0] == _WIDTHS[:, 1]]
    table, found = tables[:, None] // widths[:, 0], looked_up[None] // widths[:, 1]
    scores = np.maximum(output_bytes // widths[:, 2], 1)
    hidden = np.rint(np.sqrt(table / scores * found)).astype(np.int64)
    is_wide = (hidden >= _LEAST_HIDDEN_SIZE) & (hidden < table // np.maximum(hidden, 1))
    hidden = np.maximum(hidden, 1)
    words, tokens = table // hidden, found // hidden
    fits = is_wide & (words * hidden == table) & (tokens * hidden == found) & (output_bytes % widths[:, 2] == 0)
    fits &= (tokens * words == scores) | (tokens * -(-words // padding) * padding == scores)
    places = np.nonzero(fits)
    columns = (tokens[fits], words[fits], hidden[fits] * widths[places[2], 0])
    return list(map(Shape, *(column.tolist() for column in columns)))


# inductor pads rows to a multiple of 8 numbers; of a vocabulary, that is less than this share
_PADDED = 8
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
        sizes: their sizes and those of their gradients.
        row_bytes: bytes of a row of V 16-bit numbers, 0 if V is unknown.
    """

    outputs: Int64s
    sizes: frozenset[int]
    row_bytes: int


class CompiledPasses(BlockFinder):
    """The passes that torch.compile generated.

    The head's output is the largest block of its pass. Its gradient, of the same size except for padding, is the
    evidence: the lines of a library's loss for language models allocated it; or the sizes of a table, its gradients,
    the tokens' indices and their vectors fit together.

    Args:
        tables: sizes that an embedding's table may have.
    """

    def __init__(self, blocks: DeviceBlocks, *, tables: Int64s, weights: Int64s) -> None:
        super().__init__(blocks)
        generated = self._call_sites.at(lambda site: site.stack.is_generated)
        self._forward = np.flatnonzero(generated & blocks.in_phase(Phase.FORWARD))
        self._backward = np.flatnonzero(generated & blocks.in_phase(Phase.BACKWARD))
        self._tables, self._weights = tables, weights

    def heads(self, losses: Flags) -> CompiledHeads:
        """The head's outputs, none without evidence of a head.

        Args:
            losses: blocks of a library's loss for language models.
        """
        passes = ((blocks, self._sizes[blocks]) for blocks in runs(self._forward, self._spans[self._forward]))
        last_of_largest = [blocks[np.flatnonzero(sizes == sizes.max())[-1]] for blocks, sizes in passes]
        largest = np.array(last_of_largest, dtype=np.int64)
        gradients = np.unique(self._sizes[self._backward])
        of_loss = np.unique(self._sizes[self._backward[losses[self._backward]]])
        shape = None if len(of_loss) else self._shape(largest)
        row_bytes = 2 * shape.words if shape else 0
        rows = (row_bytes, 2 * _PADDED * -(-shape.words // _PADDED)) if shape else ()
        sizes: set[int] = set()
        for size in set(self._sizes[largest].tolist()):
            alike = _near(size, gradients).tolist()
            # rows of V 16-bit numbers, padded or not
            by_shape = len(alike) > 0 and any(size % row == 0 for row in rows)
            if by_shape or len(_near(size, of_loss, ratios=_DTYPES)):
                sizes |= {size, *alike}
        return CompiledHeads(largest[np.isin(self._sizes[largest], list(sizes))], frozenset(sizes), row_bytes)

    def _shape(self, largest: Int64s) -> Shape | None:
        """The shape of some pass's largest block, if it can be a head's output."""
        passes = dict(zip(self._spans[largest].tolist(), largest.tolist(), strict=True))
        for blocks in runs(self._forward, self._spans[self._forward])[:_PASSES_TO_SEARCH]:
            head = passes[int(self._spans[blocks[0]])]
            backward = self._next_backward(int(self._spans[head]))
            found = shapes_of(int(self._sizes[head]), self._tables, self._sizes[blocks], padding=_PADDED, casts=True)
            for shape in found:
                if self._is_head(shape, head, backward):
                    return shape
        return None

    def _is_head(self, shape: Shape, head: int, backward: Int64s) -> bool:
        table_bytes = shape.words * shape.hidden_bytes
        sizes = self._sizes[backward]
        return (
            shape.hidden_bytes in self._weights
            and len(_near(int(self._sizes[head]), np.unique(sizes))) > 0
            and int(((sizes == table_bytes) | (sizes == 2 * table_bytes)).sum()) >= _FEWEST_GRADIENTS
            and has_indices(self._device, shape.tokens, head)
        )

    def _next_backward(self, span: int) -> Int64s:
        """The blocks of the first backward pass after a span."""
        later = self._backward[self._spans[self._backward] > span]
        return later[self._spans[later] == self._spans[later[0]]] if len(later) else later


def has_indices(blocks: DeviceBlocks, tokens: int, block: int) -> bool:
    """Whether a tensor of one index per token, which no build and no optimizer made, exists when a block is made."""
    replayed, event = blocks.replayed, blocks.replayed.allocated_by[block]
    others = ~blocks.in_phase(Phase.BUILD, Phase.OPTIMIZER)
    alike = np.flatnonzero(others & (replayed.requested_bytes == tokens * _INDEX_BYTES))
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


# losses of language models, by what their libraries document
_LIBRARY_LOSS = re.compile(f"{frames.LANGUAGE_MODEL_LOSS}|{frames.FUSED_LOSS}|{frames.NLL_CHUNK}", re.MULTILINE)
_LOSS_CALL = re.compile(
    f"{frames.CROSS_ENTROPY}|{frames.LOG_SOFTMAX}|{frames.ANY_MODEL_LOSS}|{frames.LOSS_KERNEL}", re.MULTILINE
)
_LOSS_OPERATORS = frozenset({"cross_entropy_loss", "nll_loss_nd", "nll_loss", "log_softmax_int", "logsumexp"})
_LOSS_NODE = re.compile(r"NllLoss|LogSoftmax|CrossEntropy|Logsumexp")
_LOOK_UP = re.compile(frames.EMBEDDING, re.MULTILINE)
_TABLE = re.compile(frames.EMBEDDING_TABLE, re.MULTILINE)
_LINEAR = re.compile(frames.LINEAR_CALL, re.MULTILINE)
_EINSUM = re.compile(r"torch/functional\.py:einsum$", re.MULTILINE)
_PRODUCTS = frozenset({"matmul", "mm", "addmm", "einsum"})
_LOSS_MODULE = "loss"
_WORKSPACE = re.compile(r"CUDABlas\w*Workspace|cublas\w*[wW]orkspace|setWorkspaceForHandle")
# of GRU and LSTM
_GATES = (3, 4)
# of a model and its reference model: the embedding and the head; weights of layers are more
_MOST_TABLES = 4
# a vector of D numbers, and a step counter of an optimizer
_LARGEST_VECTOR_BYTES, _LARGEST_COUNTER_BYTES = 2**17, 8
_SIZES_TO_SEARCH = 64
_NO_BLOCKS = np.empty(0, dtype=np.int64)


class Vocabulary(BlockFinder):
    """The loss over a vocabulary that a recording shows, if it shows one.

    Classifiers of images and sentences compute a cross-entropy too, and encoders look tokens up without a loss over
    them. A loss over a vocabulary is known from one of:

    - the loss of a library for language models, which ran after a linear layer returned a tensor of the same size;
    - sizes: a table [V, D], the tensor [T, D] of the tokens looked up in it, and a product [T, V]. Their bytes
      determine D, which has to divide the first two and be the size of some weight, such as a norm's. A loss then
      allocated multiples of V, if the recording has a loss; an evaluation may have none;
    - the names of modules, if the recording has them: an embedding of tokens, a head, and a loss.

    Attributes:
        sizes: sizes of the head's outputs, of their upcast and of their gradients; empty without a head.

    Args:
        generates: whether the recording shows a generation, whose head is not part of a loss.
    """

    def __init__(self, blocks: DeviceBlocks, *, generates: bool = False) -> None:
        super().__init__(blocks)
        call_sites = blocks.call_sites
        self._sites, self._site_of = call_sites.sites, call_sites.site_of
        self._calls = np.cumsum(call_sites.index_in_call == 0)
        self._is_last = _last_of_calls(call_sites)
        self._generates = generates
        library_loss = call_sites.matching(_LIBRARY_LOSS)
        self._has_library_loss = bool(library_loss.any())
        self._row_bytes = 0
        # the number of the model's own forward methods around each block
        self._depths: Int64s = np.array([len(site.stack.model_calls) for site in self._sites], np.int64)[self._site_of]
        # sizes of weights, and of kept blocks older than the recording, which may be weights
        is_weight = blocks.in_phase(Phase.BUILD) | (blocks.in_phase(None) & (self._replayed.freed_by < 0))
        self._weights = self._sizes[is_weight & ~call_sites.matching_inner(DDP_BUCKET)]
        self._counts = Counter(self._weights.tolist())
        vectors = sorted(size for size in self._counts if _LARGEST_COUNTER_BYTES < size <= _LARGEST_VECTOR_BYTES)
        # sizes of vectors that many weights share, as the weights of norms do
        self._many = max(max((self._counts[size] for size in vectors), default=0) // 2, 1)
        self._vectors = [size for size in vectors if self._counts[size] >= self._many]
        heads = self._find_heads(library_loss)
        outputs = set(self._sizes[heads].tolist())
        passes = CompiledPasses(blocks, tables=self._table_sizes, weights=self._weights)
        compiled = passes.heads(library_loss)
        self._heads = np.unique(np.append(heads, compiled.outputs))
        self._row_bytes = self._row_bytes or compiled.row_bytes
        self.sizes = frozenset(outputs | {2 * size for size in outputs} | compiled.sizes)

    def __bool__(self) -> bool:
        return len(self._heads) > 0 or self._has_library_loss

    def is_multiple(self, size: int) -> bool:
        """Whether a size is that of rows of V numbers; False if V is unknown."""
        return self._row_bytes > 0 and size >= self._row_bytes and size % self._row_bytes == 0

    def is_shifted(self, size: int) -> bool:
        """Whether a size is that of logits without one token of each sequence."""
        return any(logits // 2 < size < logits and logits % (logits - size) == 0 for logits in self.sizes)

    @cached_property
    def follows_head(self) -> Flags:
        """Whether each block comes after a head's output in the same pass, and from code as far outside as the head.

        Layers that run after the head of another model in the same pass are called from further inside.
        """
        head = self._last_head
        depths = self._depths
        return (head >= 0) & (self._spans[head] == self._spans) & (depths <= depths[head])

    @cached_property
    def first_of_size(self) -> Flags:
        """Whether each block is the first of its size after the head's output that precedes it."""
        first = np.zeros(len(self._sizes), dtype=bool)
        follows = np.flatnonzero(self.follows_head)
        group = number_pairs(self._last_head[follows], self._call_sites.sizes[1][follows])
        first[follows[np.unique(group, return_index=True)[1]]] = True
        return first

    @cached_property
    def _last_head(self) -> Int64s:
        """The last head's output up to each block, -1 if there is none."""
        last = np.full(len(self._sizes), -1, dtype=np.int64)
        last[self._heads] = self._heads
        return np.maximum.accumulate(last)

    def _find_heads(self, library_loss: Flags) -> Int64s:
        losses = self._blocks(_is_loss, Phase.FORWARD)
        has_loss = len(losses) > 0 or any(_LOSS_NODE.search(site.node) for site in self._sites)
        if self._generates and not has_loss:
            return _NO_BLOCKS
        modules = {site.module for site in self._sites if site.stamp}
        if has_loss and any(map(is_head, modules)) and any(map(is_token_embedding, modules)):
            return self._outputs(_is_head_output)
        # evidence of one kind less needs a table that is as large as tables are
        large = self._table_sizes[2 * self._table_sizes >= self._table_sizes.max(initial=0)]
        outputs = self._outputs(_is_linear)
        tables = self._table_sizes if has_loss and len(self._known_tables) else large
        heads = self._heads_by_sizes(outputs, losses, tables)
        if heads is None:
            in_library = np.flatnonzero(library_loss & self._device.in_phase(Phase.FORWARD))
            heads = self._heads_by_library(outputs, in_library)
        if not len(heads):
            heads = self._heads_by_indices(large)
        if not len(heads):
            outputs = self._outputs(_is_written_product)
            heads = self._heads_by_sizes(outputs, losses, large)
        if heads is None:
            return _NO_BLOCKS
        calls = {_head_call(self._sites[site]) for site in self._site_of[heads].tolist()}
        of_head = self._call_sites.at(lambda site: _head_call(site) in calls)[outputs]
        # layers of a Sequential share their call
        sized = self._sizes[outputs] % self._row_bytes == 0 if self._row_bytes else np.isin(outputs, heads)
        return outputs[of_head & sized]

    def _heads_by_sizes(self, outputs: Int64s, losses: Int64s, tables: Int64s) -> Int64s | None:
        """The outputs [T, V] of a pass that looked T tokens up in a table of V rows; None if there are none.

        Recurrent layers have no vectors of D numbers, but biases of all their gates, which other layers may have by
        chance: the loss then has to make a tensor as large as the output.
        """
        found = self._heads_by_vectors(outputs, losses, tables, 1)
        if found is None and len(losses):
            sizes = self._sizes[losses]
            as_large = outputs[np.isin(self._sizes[outputs], np.append(sizes, sizes // 2))]
            found = self._heads_by_vectors(as_large, losses, tables, *_GATES)
        return found

    def _heads_by_vectors(self, outputs: Int64s, losses: Int64s, tables: Int64s, *gates: int) -> Int64s | None:
        """The outputs of a head for which some weight is a vector of D numbers per gate."""
        looked_up = self._outputs(is_look_up)
        loss_sizes = np.unique(self._sizes[losses])
        for span in islice(dict.fromkeys(self._spans[looked_up].tolist()), _PASSES_TO_SEARCH):
            look_ups = looked_up[self._spans[looked_up] == span]
            tokens = self._sizes[look_ups]
            in_span = outputs[self._spans[outputs] == span]
            if not len(losses):
                # a head is called from about as far outside as the table, layers from further inside
                in_span = in_span[self._depths[in_span] <= self._depths[look_ups].max() + 1]
            for size in np.unique(self._sizes[in_span])[::-1][:_SIZES_TO_SEARCH].tolist():
                found = shapes_of(size, tables, tokens, casts=len(losses) > 0)
                rows = [2 * shape.words for shape in found if self._is_weight(shape.hidden_bytes, gates)]
                rows = [row for row in rows if not len(losses) or (loss_sizes[loss_sizes >= row] % row == 0).any()]
                if rows:
                    self._row_bytes = min(rows)
                    sized = in_span[self._sizes[in_span] == size]
                    # layers can be as wide as the vocabulary, but are called from further inside
                    return sized[self._depths[sized] == self._depths[sized].min()]
        return None

    def _heads_by_indices(self, tables: Int64s) -> Int64s:
        """The outputs [K, V] of a head that computes the logits of K of the T tokens, as a loss of completions needs.

        Without [T, V], the indices [T] of the tokens show D, and the table V.
        """
        outputs = self._outputs(lambda site: site.stack.in_head)
        looked_up = self._outputs(is_look_up)
        # the loss of a pass that backward does not follow is outside of it
        loss_sizes = np.unique(self._sizes[self._blocks(_is_named_loss, Phase.FORWARD, Phase.OUTSIDE)])
        if not (len(outputs) and len(loss_sizes)):
            return _NO_BLOCKS
        for block in looked_up[:_PASSES_TO_SEARCH].tolist():
            sizes = self._sizes[outputs[self._spans[outputs] == self._spans[block]]]
            for hidden_bytes, table in product(self._vectors, tables.tolist()):
                row = 2 * (table // hidden_bytes)
                tokens = int(self._sizes[block]) // hidden_bytes
                if (
                    table % hidden_bytes == 0
                    and self._sizes[block] % hidden_bytes == 0
                    and (sizes % row == 0).any()
                    and (loss_sizes[loss_sizes >= row] % row == 0).any()
                    and has_indices(self._device, tokens, block)
                ):
                    self._row_bytes = row
                    return outputs[self._sizes[outputs] % row == 0]
        return _NO_BLOCKS

    def _heads_by_library(self, outputs: Int64s, losses: Int64s) -> Int64s:
        """The output before each loss that is as large as the loss's largest tensor, or half of it in 16 bit."""
        heads: list[int] = []
        for of_loss in runs(losses, self._spans[losses]):
            largest = int(self._sizes[of_loss].max())
            first = np.searchsorted(self._spans, self._spans[of_loss[0]])
            before = outputs[slice(*np.searchsorted(outputs, (first, of_loss[0])))]
            sized = before[np.isin(self._sizes[before], (largest, largest // 2))]
            heads.extend(sized[-1:].tolist())
        return np.array(heads, dtype=np.int64)

    @cached_property
    def _known_tables(self) -> Int64s:
        """Sizes of embeddings' tables: by their constructors and their gradients."""
        constructed = self._sizes[self._blocks(lambda site: _TABLE.search(site.stack.text) is not None, Phase.BUILD)]
        backward = self._blocks(lambda site: site.node.startswith("Embedding"), Phase.BACKWARD)
        if len(backward):
            # the table's gradient is larger than the sorted tokens
            calls = np.flatnonzero(np.diff(self._calls[backward], prepend=-1))
            constructed = np.append(constructed, np.maximum.reduceat(self._sizes[backward], calls))
        return np.unique(constructed)

    @cached_property
    def _table_sizes(self) -> Int64s:
        """Sizes that an embedding's table may have: of known tables, else of all weights and older blocks."""
        if len(self._known_tables):
            return self._known_tables
        return np.array(sorted(size for size, count in self._counts.items() if count <= _MOST_TABLES), dtype=np.int64)

    def _is_weight(self, size: int, factors: Sequence[int]) -> bool:
        """Whether some weights have a size, times a factor; without known tables, half as many as of any vector."""
        needed = 1 if len(self._known_tables) else self._many
        return not len(self._weights) or any(self._counts[size * factor] >= needed for factor in factors)

    def _outputs(self, chosen: Callable[[CallSite], bool]) -> Int64s:
        """The last block of each call of forward from the chosen sites."""
        blocks = self._blocks(chosen, Phase.FORWARD)
        return blocks[self._is_last[blocks]]

    def _blocks(self, chosen: Callable[[CallSite], bool], *phases: Phase) -> Int64s:
        """Blocks that the chosen sites allocated in one of some phases."""
        return np.flatnonzero(self._call_sites.at(chosen) & self._device.in_phase(*phases))


def _last_of_calls(call_sites: CallSites) -> Flags:
    """Whether each block is its call's last, apart from a workspace that cuBLAS allocates for the first product."""
    last: Flags = call_sites.index_in_call == call_sites.blocks_in_call - 1
    workspaces = call_sites.at(lambda site: _WORKSPACE.search(site.stack.native_text) is not None)
    for block in np.flatnonzero(workspaces & (call_sites.index_in_call > 0))[::-1].tolist():
        if last[block]:
            last[block - 1 : block + 1] = True, False
    return last


def _is_loss(site: CallSite) -> bool:
    """Whether a site computes some loss; what a script allocates between forward and backward is one too."""
    return site.stack.phase is Phase.OUTSIDE or site.module == _LOSS_MODULE or _is_named_loss(site)


def _is_named_loss(site: CallSite) -> bool:
    stack = site.stack
    return _LOSS_CALL.search(stack.text) is not None or not _LOSS_OPERATORS.isdisjoint(stack.operators)


def is_look_up(site: CallSite) -> bool:
    """Whether a site looks tokens up in a table."""
    return _LOOK_UP.search(site.stack.text) is not None or "embedding" in site.stack.operators


def _is_head_output(site: CallSite) -> bool:
    """Whether the head's module computes; a loss can run the head's backward within forward."""
    return is_head(site.module) and ((not site.stack.calls and not site.node) or _is_linear(site))


def _is_linear(site: CallSite) -> bool:
    stack = site.stack
    return stack.in_linear or _LINEAR.search(stack.text) is not None or "linear" in stack.operators


def _is_written_product(site: CallSite) -> bool:
    """Whether the model's own code may compute a product, such as `x @ weight.T`, which has no frame of its own."""
    stack = site.stack
    if stack.below_model or not stack.calls:
        return _EINSUM.search(stack.text) is not None
    return not stack.native or not stack.operators.isdisjoint(_PRODUCTS)


def _head_call(site: CallSite) -> tuple[PythonCall, ...]:
    return site.stack.calls[: len(site.stack.below_model) + 1]
