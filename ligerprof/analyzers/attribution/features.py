"""Work out what the rules ask about a block: how long it lived, what its size equals, where it was made."""

import re
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from ligerprof.analyzers.attribution.call_sites import Request, Requests
from ligerprof.analyzers.attribution.phases import Timeline, phase_code, phase_of_code
from ligerprof.analyzers.attribution.rules import Facts, Trait
from ligerprof.models.module_names import body_of_layer, is_attention, is_head, is_token_embedding
from ligerprof.roles import Phase
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s
from ligerprof.units import MIB

# what cuBLAS takes by default: 32 MiB on Hopper, 8.125 MiB elsewhere (ATen/cuda/CublasHandlePool.cpp)
_WORKSPACE_SIZES = frozenset({32 * MIB, 8519680})
_SMALL_SHARE = 10_000
_EMBEDDING_CALL = "nn/modules/sparse.py:forward"
_CONSTRUCTOR = re.compile(r"nn/modules/\w+\.py:__init__$", re.MULTILINE)
_CHECKPOINT_CALL = "torch/utils/checkpoint.py:"
_SOFTMAX = re.compile(r"functional\.py:softmax\n(?:.*\n)*?.*:eager_attention_forward$", re.MULTILINE)
_SCORE_NODES = re.compile(r"Softmax|Bmm|Mul|Add|ToCopy|Dropout")


class FactFinder:
    """Facts on the blocks that are alive at one moment.

    Args:
        layers: of every block the decoder layer, -1 where forward and backward do not tell it.
        live: their indices.
        peak_bytes: allocated bytes at that moment.
    """

    def __init__(
        self,
        replayed: Replay,
        requests: Requests,
        timeline: Timeline,
        *,
        layers: Int64s,
        live: Int64s,
        peak_bytes: int,
    ) -> None:
        self._requests = requests
        self._timeline = timeline
        self._layers = layers
        self._replayed = replayed
        self._live = live
        self._peak_bytes = peak_bytes
        self._sizes = replayed.requested_bytes
        self._made = replayed.allocated_by
        self._runs = timeline.runs_of(replayed.allocated_by)
        self._phases = timeline.phases_of(replayed.allocated_by)
        for block in range(len(replayed.older_blocks)):
            self._phases[block] = phase_code(requests.of(block).stack.phase)
        self._static: dict[int, frozenset[Trait]] = {}

    def facts(self, block: int) -> Facts:
        """What the rules look at."""
        request, phase = self._requests.of(block), phase_of_code(int(self._phases[block]))
        traits = {trait for trait, holds in self._varying(block, request, phase) if holds}
        return Facts(
            phase=phase,
            stack=request.stack.text,
            native=request.stack.native_text,
            node=request.node,
            module=request.module,
            traits=self._place_traits(block, request) | traits,
        )

    def signatures(self, blocks: Int64s) -> Iterator[tuple[int, ...]]:
        """All that the facts on each block depend on: equal ones have equal facts."""
        freed = self._replayed.freed_by[blocks]
        kept = freed < 0
        freed_run = np.where(kept, self._timeline.last_run, self._timeline.runs_of(freed))
        runs, made = self._runs[blocks], self._replayed.allocated_by[blocks]
        columns = (
            self._requests.kind_of[blocks],
            self._replayed.requested_bytes[blocks],
            self._phases[blocks],
            kept,
            np.sign(freed_run - runs),
            made < self._timeline.last_pause,
            ~kept & (freed < self._requests.next_call[blocks]),
            self._requests.place[blocks],
            self._requests.count[blocks],
            np.isin(blocks, list(self._first_workspaces)),
            self._layers[blocks] < self._deepest_layer[runs],
            self._last_checkpointed[runs] <= blocks,
        )
        return zip(*(column.tolist() for column in columns), strict=True)

    def phases(self, blocks: Int64s) -> list[Phase | None]:
        """The phase each block was made in; that of its stack where it is older than the recording."""
        return [phase_of_code(code) for code in self._phases[blocks].tolist()]

    def _varying(self, block: int, request: Request, phase: Phase | None) -> Iterator[tuple[Trait, bool]]:
        yield from self._lifetime(block)
        yield from self._size(block)
        yield from self._call(block, request)
        size = int(self._sizes[block])
        if size in self._score_sizes:
            behind = phase is Phase.BACKWARD and _SCORE_NODES.search(request.node) is not None
            in_attention = not request.module or is_attention(request.module)
            yield Trait.ATTENTION_SCORES, _is_eager(request) or (behind and in_attention)
        if phase is not Phase.FORWARD and not self._has_modules(request):
            return
        yield Trait.IN_LOSS_AREA, self._in_loss_area(request)
        if not self._has_modules(request):
            yield Trait.AFTER_LAYERS, self._is_after_layers(block)

    def _lifetime(self, block: int) -> Iterator[tuple[Trait, bool]]:
        freed, made_run = int(self._replayed.freed_by[block]), int(self._runs[block])
        freed_run = self._timeline.run_at(freed) if freed >= 0 else None
        yield Trait.NEVER_FREED, freed_run is None
        yield Trait.DIES_IN_PHASE, freed_run == made_run
        outlives_phase = (self._timeline.last_run if freed_run is None else freed_run) > made_run
        yield Trait.OUTLIVES_PHASE, outlives_phase
        yield Trait.OUTLIVES_STEP, freed_run is None and bool(self._made[block] < self._timeline.last_pause)
        yield Trait.OUTLIVES_LAYER, outlives_phase or (freed_run is None and self._in_later_layer(block))
        yield Trait.DIES_IN_CALL, 0 <= freed < int(self._requests.next_call[block])

    def _in_later_layer(self, block: int) -> bool:
        """Whether a later layer has begun in the run that made a block: a recording can end within forward."""
        return bool(self._layers[block] < self._deepest_layer[self._runs[block]])

    def _size(self, block: int) -> Iterator[tuple[Trait, bool]]:
        size = int(self._sizes[block])
        yield Trait.WEIGHT_SIZED, size in self._weight_sizes
        yield Trait.HALF_WEIGHT_SIZED, 2 * size in self._weight_sizes
        yield Trait.HEAD_WEIGHT_SIZED, size in self._head_weight_sizes
        yield Trait.WORKSPACE_SIZED, size in _WORKSPACE_SIZES
        yield Trait.FIRST_WORKSPACE, block in self._first_workspaces
        yield Trait.SMALL, size * _SMALL_SHARE < self._peak_bytes
        yield Trait.PLANE_SIZED, size in self._planes
        yield Trait.SHIFTED_PLANE_SIZED, any(_is_shifted(size, plane) for plane in self._planes)

    def _call(self, block: int, request: Request) -> Iterator[tuple[Trait, bool]]:
        """Where a block stands among those of its call: autocast casts arguments from the last to the first."""
        if not request.is_known:
            return
        index, count = int(self._requests.place[block]), int(self._requests.count[block])
        yield Trait.FIRST_OF_CALL, index == 0 and count > 1
        # a linear layer's input is its first argument; Conv1D's is that of addmm, the second of three
        cast_input = 1 if "pytorch_utils.py:forward" in request.stack.text else count - 2
        yield Trait.CAST_ARGUMENT, index < count - 1 and (count == 2 or index != cast_input)

    def _place_traits(self, block: int, request: Request) -> frozenset[Trait]:
        kind = int(self._requests.kind_of[block])
        if kind not in self._static:
            self._static[kind] = frozenset(trait for trait, holds in self._place(request) if holds)
        return self._static[kind]

    def _place(self, request: Request) -> Iterator[tuple[Trait, bool]]:
        stack, module = request.stack, request.module
        yield Trait.CHECKPOINTING, self._checkpointing
        yield Trait.RECOMPUTED, request.recomputes
        yield Trait.IN_EMBEDDING, is_token_embedding(module) or _EMBEDDING_CALL in stack.text
        if self._has_modules(request):
            yield Trait.IN_LAYER, request.layer is not None
            yield Trait.AFTER_LAYERS, request.layer is not None and request.layer == self._last_layer
            yield Trait.IN_MODEL_BODY, module in self._bodies
            yield Trait.IN_HEAD, is_head(module)
        else:
            yield Trait.IN_LAYER, _CHECKPOINT_CALL in stack.text
            yield Trait.IN_MODEL_BODY, len(stack.model_calls) == 2 and not stack.below_model
            yield Trait.IN_HEAD, stack.in_head

    def _has_modules(self, request: Request) -> bool:
        """Whether the stamps of this recording name modules."""
        return request.stamp is not None and len(self._modules) > 1

    def _in_loss_area(self, request: Request) -> bool:
        """Whether the model itself asked, its head, or the loss, and none of its other parts."""
        if self._has_modules(request):
            return request.module in self._loss_modules
        return len(request.stack.model_calls) <= 1

    def _is_after_layers(self, block: int) -> bool:
        """Whether no checkpointed layer allocated after this block in its run: the last layer made it."""
        return bool(self._last_checkpointed[self._runs[block]] <= block)

    @cached_property
    def _built(self) -> Int64s:
        built: Int64s = self._live[self._phases[self._live] == phase_code(Phase.BUILD)]
        return built

    @cached_property
    def _constructed(self) -> Int64s:
        """Blocks that constructors of torch's modules made, whatever became of them."""
        made = [_CONSTRUCTOR.search(kind.stack.text) is not None for kind in self._requests.kinds]
        return self._blocks_of(made, Phase.BUILD)

    @cached_property
    def _weight_sizes(self) -> frozenset[int]:
        """Sizes of what was made while the model was built, also of weights that an engine has cut up since."""
        return frozenset(self._sizes[np.append(self._built, self._constructed)].tolist())

    @cached_property
    def _head_weight_sizes(self) -> frozenset[int]:
        """Sizes of embeddings, which the head's weight shares; of the largest weight where none was seen to be made."""
        made = "nn/modules/sparse.py:__init__"
        blocks = np.append(self._built, self._constructed)
        of_kind = np.array([made in kind.stack.text for kind in self._requests.kinds], dtype=bool)
        sizes = self._sizes[blocks[of_kind[self._requests.kind_of[blocks]]]].tolist()
        return frozenset(sizes or sorted(self._weight_sizes)[-1:])

    @cached_property
    def _planes(self) -> frozenset[int]:
        """Sizes of the logits, which the head's call makes last, and of their upcast."""
        is_output = [_is_head_output(kind) for kind in self._requests.kinds]
        blocks = self._blocks_of(is_output)
        is_last = self._requests.place[blocks] == self._requests.count[blocks] - 1
        outputs = set(self._sizes[blocks[is_last]].tolist())
        return frozenset(outputs | {2 * size for size in outputs})

    @cached_property
    def _first_workspaces(self) -> frozenset[int]:
        """The first block of each phase that may be cuBLAS's: kept for good, and made by a product after its output."""
        first: dict[int, int] = {}
        backward = phase_code(Phase.BACKWARD)
        kept = self._replayed.freed_by < 0
        sized = np.isin(self._replayed.requested_bytes, list(_WORKSPACE_SIZES))
        for block in np.flatnonzero(sized & kept & (self._requests.place > 0)).tolist():
            phase = int(self._phases[block])
            in_product = self._requests.of(block).stack.in_linear or phase == backward
            if in_product or self._made[block] < self._timeline.last_pause:
                first.setdefault(phase, block)
        return frozenset(first.values())

    @cached_property
    def _deepest_layer(self) -> Int64s:
        """The last layer that had begun in each run; the last entry is of the time before the recording."""
        known = np.flatnonzero((self._layers >= 0) & (self._runs >= 0))
        return self._highest_by_run(known, self._layers[known])

    @cached_property
    def _score_sizes(self) -> frozenset[int]:
        """Sizes of eager attention's score matrices, in either precision."""
        is_softmax = [_SOFTMAX.search(kind.stack.text) is not None for kind in self._requests.kinds]
        sizes = set(self._sizes[self._blocks_of(is_softmax)].tolist())
        return frozenset(sizes | {2 * size for size in sizes} | {size // 2 for size in sizes})

    @cached_property
    def _last_checkpointed(self) -> Int64s:
        """The last block that a checkpointed layer made in each run of forward; else -1."""
        blocks = self._blocks_of([_CHECKPOINT_CALL in kind.stack.text for kind in self._requests.kinds])
        return self._highest_by_run(blocks, blocks)

    def _highest_by_run(self, blocks: Int64s, values: Int64s) -> Int64s:
        """The highest of the blocks' values in each run, -1 where a run made none of them."""
        highest = np.full(self._timeline.last_run + 2, -1, dtype=np.int64)
        np.maximum.at(highest, self._runs[blocks], values)
        return highest

    def _blocks_of(self, chosen: list[bool], phase: Phase = Phase.FORWARD) -> Int64s:
        """Blocks made in a phase by the kinds of request that are chosen."""
        if not any(chosen):
            return np.empty(0, dtype=np.int64)
        in_phase = self._phases == phase_code(phase)
        return np.flatnonzero(np.array(chosen, dtype=bool)[self._requests.kind_of] & in_phase).astype(np.int64)

    @cached_property
    def _checkpointing(self) -> bool:
        return any(kind.recomputes or _CHECKPOINT_CALL in kind.stack.text for kind in self._requests.kinds)

    @cached_property
    def _modules(self) -> frozenset[str]:
        return frozenset(kind.module for kind in self._requests.kinds if kind.stamp)

    @cached_property
    def _last_layer(self) -> int:
        return max((kind.layer for kind in self._requests.kinds if kind.layer is not None), default=-1)

    @cached_property
    def _bodies(self) -> frozenset[str]:
        """Modules that hold the decoder layers."""
        found = (body_of_layer(module) for module in self._modules)
        return frozenset(body for body in found if body is not None)

    @cached_property
    def _loss_modules(self) -> frozenset[str]:
        """The head, the modules around it, and the loss."""
        heads = [module for module in self._modules if is_head(module)]
        around = {".".join(head.split(".")[:depth]) for head in heads for depth in range(head.count(".") + 2)}
        return frozenset({"", "loss"} | around) - self._bodies


def _is_eager(request: Request) -> bool:
    return "eager_attention_forward" in request.stack.text


def _is_head_output(request: Request) -> bool:
    """Whether the head's own matrix product ran, no fused loss in its place."""
    if not request.module:
        return request.stack.in_head
    return is_head(request.module) and (not request.stack.calls or request.stack.in_linear)


def _is_shifted(size: int, plane: int) -> bool:
    """Whether `size` is `plane` less one token of each sequence."""
    return plane // 2 < size < plane and plane % (plane - size) == 0
