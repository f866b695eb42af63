"""Give every block alive at a moment its role, module, frame, phase and layer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ligerprof.analyzers.attribution_rules import Facts, Trait, role_of
from ligerprof.analyzers.attribution_stacks import Stack, Stacks
from ligerprof.analyzers.attribution_timeline import Timeline, make_timeline
from ligerprof.roles import MemoryBreakdown, Phase, Role
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.stamp import Stamp
from ligerprof.units import MIB

# cuBLAS takes 32 MiB on Hopper, 8.125 MiB elsewhere (c10's parse of CUBLAS_WORKSPACE_CONFIG), cuBLASLt 1 MiB and more
_WORKSPACE_SIZES = frozenset({32 * MIB, 8519680})
_SMALL_SHARE = 10_000
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")
_BODY = re.compile(r"^(.*?)\.?(?:layers|h|blocks)\.\d+$")
_HEADS = ("lm_head", "embed_out")
_EMBEDDING = re.compile(r"nn/modules/sparse\.py:forward$", re.MULTILINE)
_CHECKPOINT = re.compile(r"torch/utils/checkpoint\.py:")
_SOFTMAX = re.compile(r"functional\.py:softmax\n(?:.*\n)*?.*:eager_attention_forward$", re.MULTILINE)
_SCORE_NODES = re.compile(r"Softmax|Bmm|Mul|Add|ToCopy|Dropout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Who holds one block.

    Attributes:
        block: its index in the replay.
        module: dotted module name, "" where unknown.
        frame: the Python call or autograd node that asked, or "".
        layer: index of the decoder layer, None outside or where unknown.
    """

    block: int
    requested_bytes: int
    role: Role
    module: str
    frame: str
    phase: Phase
    layer: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """What asked for a block."""

    stack: Stack
    stamp: Stamp | None

    def same_as(self, other: "_Call") -> bool:
        return (
            self.stamp == other.stamp and self.stack.calls == other.stack.calls and self.stack.node == other.stack.node
        )


class Attribution:
    """The owners of a replayed device's blocks.

    Args:
        replayed: the device.
        annotations: the snapshot's named ranges of time.
    """

    def __init__(self, replayed: Replay, annotations: Sequence[Mapping[str, Any]] = ()) -> None:
        self.replayed = replayed
        self._stacks = Stacks()
        self.timeline: Timeline = make_timeline(replayed, self._stacks, annotations)

    def owners_at(self, moment: int) -> list[Owner]:
        """Who holds the blocks that are alive at a moment, oldest first."""
        live = self.replayed.live_at(moment).tolist()
        context = _Context(self, live, int(self.replayed.allocated_bytes[moment]))
        return [self._owner(block, context) for block in live]

    def _owner(self, block: int, context: "_Context") -> Owner:
        call = self.call(block)
        stamp = call.stamp
        module = stamp.module if stamp else ""
        layer = _LAYER.search(module)
        return Owner(
            block=block,
            requested_bytes=int(self.replayed.requested_bytes[block]),
            role=role_of(context.facts(block, call)),
            module=module,
            frame=call.stack.shown or (stamp.node if stamp else ""),
            phase=self.phase(block) or Phase.OUTSIDE,
            layer=int(layer.group(1)) if layer else None,
        )

    def call(self, block: int) -> _Call:
        """The stack and the stamp of a block's allocation."""
        stack = self._stacks.of(self.replayed.frames_of(block))
        return _Call(stack=stack, stamp=self.replayed.stamp_of(int(self.replayed.allocated_by[block])))

    def phase(self, block: int) -> Phase | None:
        """The phase a block was made in; that of its stack where it is older than the recording."""
        event = int(self.replayed.allocated_by[block])
        return self.timeline.phase_at(event) if event >= 0 else self.call(block).stack.phase


def breakdown(replayed: Replay, moment: int, owners: Sequence[Owner]) -> MemoryBreakdown:
    """Requested bytes by role; what blocks hold beyond them is the allocator's rounding."""
    roles = dict.fromkeys(Role, 0)
    for owner in owners:
        roles[owner.role] += owner.requested_bytes
    roles[Role.ALLOCATOR_ROUNDING] = int(replayed.allocated_bytes[moment]) - sum(roles.values())
    return MemoryBreakdown(roles=roles)


class _Context:
    """What the facts of one block need to know of the others."""

    def __init__(self, attribution: Attribution, live: Sequence[int], peak_bytes: int) -> None:
        self._attribution = attribution
        self._replayed = attribution.replayed
        self._timeline = attribution.timeline
        self._live = live
        self._peak_bytes = peak_bytes

    def facts(self, block: int, call: _Call) -> Facts:
        phase = self._attribution.phase(block)
        traits = frozenset(
            trait
            for trait, holds in (
                *self._lifetime(block),
                *self._size(block, call, phase),
                *self._call_traits(block, call),
                *self._place(block, call, phase),
            )
            if holds
        )
        node = call.stamp.node if call.stamp and call.stamp.node else call.stack.node
        return Facts(phase=phase, stack=call.stack.text, native=call.stack.native_text, node=node, traits=traits)

    def _lifetime(self, block: int) -> Iterator[tuple[Trait, bool]]:
        made, freed = int(self._replayed.allocated_by[block]), int(self._replayed.freed_by[block])
        made_run = self._timeline.run_at(made)
        freed_run = self._timeline.run_at(freed) if freed >= 0 else None
        yield Trait.NEVER_FREED, freed_run is None
        yield Trait.DIES_IN_PHASE, freed_run == made_run
        yield Trait.OUTLIVES_PHASE, (self._timeline.last_run if freed_run is None else freed_run) > made_run
        yield Trait.DIES_IN_CALL, freed >= 0 and self._call_ends_after(block, freed)

    def _call_ends_after(self, block: int, freed: int) -> bool:
        """Whether a block was freed before any other call allocated."""
        call = self._attribution.call(block)
        for other in range(block + 1, len(self._replayed.allocated_by)):
            if int(self._replayed.allocated_by[other]) > freed:
                return True
            if not call.same_as(self._attribution.call(other)):
                return False
        return True

    def _size(self, block: int, call: _Call, phase: Phase | None) -> Iterator[tuple[Trait, bool]]:
        size = int(self._replayed.requested_bytes[block])
        yield Trait.WEIGHT_SIZED, size in self._weight_sizes
        yield Trait.HALF_WEIGHT_SIZED, 2 * size in self._weight_sizes
        yield Trait.WORKSPACE_SIZED, size in _WORKSPACE_SIZES
        yield Trait.SMALL, size * _SMALL_SHARE < self._peak_bytes
        yield Trait.PLANE_SIZED, size in self._planes
        yield Trait.SHIFTED_PLANE_SIZED, any(_is_shifted(size, plane) for plane in self._planes)
        yield Trait.HEAD_WEIGHT_SIZED, size in self._head_weight_sizes
        if size in self._score_sizes:
            module = call.stamp.module if call.stamp else ""
            node = call.stamp.node if call.stamp else call.stack.node
            eager = "eager_attention_forward" in call.stack.text
            behind = phase is Phase.BACKWARD and _SCORE_NODES.search(node) and (not module or module.endswith("attn"))
            yield Trait.ATTENTION_SCORES, eager or bool(behind)

    def _position_in_call(self, block: int, call: _Call) -> tuple[int, int]:
        """How many blocks the same call made before this one, and how many in all."""
        first, last, made = block, block, len(self._replayed.allocated_by)
        while first > 0 and call.same_as(self._attribution.call(first - 1)):
            first -= 1
        while last + 1 < made and call.same_as(self._attribution.call(last + 1)):
            last += 1
        return block - first, last - first + 1

    def _call_traits(self, block: int, call: _Call) -> Iterator[tuple[Trait, bool]]:
        """Where a block stands among those of its call: autocast casts arguments from the last to the first."""
        if call.stack.calls or call.stamp is not None or call.stack.node:
            index, count = self._position_in_call(block, call)
            yield Trait.FIRST_OF_CALL, index == 0 and count > 1
            # a linear layer's input is its first argument, Conv1D's that of addmm the second of three
            cast_input = 1 if "pytorch_utils.py:forward" in call.stack.text else count - 2
            yield Trait.CAST_ARGUMENT, index < count - 1 and (count == 2 or index != cast_input)

    def _place(self, block: int, call: _Call, phase: Phase | None) -> Iterator[tuple[Trait, bool]]:
        stack, stamp = call.stack, call.stamp
        yield Trait.CHECKPOINTING, self._checkpointing
        yield Trait.RECOMPUTED, stamp.recompute if stamp else stack.recomputes
        yield Trait.IN_EMBEDDING, _EMBEDDING.search(stack.text) is not None
        if stamp is not None and len(self._modules) > 1:
            layer = _LAYER.search(stamp.module)
            yield Trait.IN_LAYER, layer is not None
            yield Trait.AFTER_LAYERS, layer is not None and int(layer.group(1)) == self._last_layer
            yield Trait.IN_MODEL_BODY, stamp.module in self._bodies
            yield Trait.IN_HEAD, stamp.module.endswith(_HEADS)
            yield Trait.IN_LOSS_AREA, stamp.module in self._loss_modules
        else:
            yield Trait.IN_LAYER, _CHECKPOINT.search(stack.text) is not None
            yield Trait.AFTER_LAYERS, self._is_after_layers(block)
            yield Trait.IN_MODEL_BODY, stack.model_depth == 2 and not stack.below_model
            yield Trait.IN_HEAD, stack.in_head
            yield Trait.IN_LOSS_AREA, phase is Phase.FORWARD and stack.model_depth <= 1

    def _is_after_layers(self, block: int) -> bool:
        """Whether no checkpointed layer allocated after this block in its run: the last layer made it."""
        run = self._timeline.run_at(int(self._replayed.allocated_by[block]))
        return self._last_checkpointed_block.get(run, -1) <= block

    @cached_property
    def _weight_sizes(self) -> frozenset[int]:
        """Sizes of what was made while the model was built."""
        build = (block for block in self._live if self._attribution.phase(block) is Phase.BUILD)
        return frozenset(int(self._replayed.requested_bytes[block]) for block in build)

    @cached_property
    def _head_weight_sizes(self) -> frozenset[int]:
        """Sizes of embeddings, which the head's weight shares; of the largest weight where none was seen to be made."""
        build = [block for block in self._live if self._attribution.phase(block) is Phase.BUILD]
        sizes = [int(self._replayed.requested_bytes[block]) for block in build if self._makes_embedding(block)]
        return frozenset(sizes or sorted(self._weight_sizes)[-1:])

    def _makes_embedding(self, block: int) -> bool:
        return "nn/modules/sparse.py:__init__" in self._attribution.call(block).stack.text

    @cached_property
    def _all_calls(self) -> list[_Call]:
        return [self._attribution.call(block) for block in range(len(self._replayed.allocated_by))]

    @cached_property
    def _forward_calls(self) -> list[tuple[int, _Call]]:
        """Blocks made in forward, and who asked."""
        return [
            (block, call)
            for block, call in enumerate(self._all_calls)
            if self._attribution.phase(block) is Phase.FORWARD
        ]

    @cached_property
    def _planes(self) -> frozenset[int]:
        """Sizes of the logits: the head's output, its upcast, and its halved copy."""
        outputs: set[int] = set()
        for index, (block, call) in enumerate(self._forward_calls):
            if not _is_head_output(call):
                continue
            following = self._forward_calls[index + 1][1] if index + 1 < len(self._forward_calls) else None
            # the last allocation of the head's call is its output
            if following is None or not call.same_as(following):
                outputs.add(int(self._replayed.requested_bytes[block]))
        return frozenset(outputs | {2 * size for size in outputs})

    @cached_property
    def _score_sizes(self) -> frozenset[int]:
        """Sizes of eager attention's score matrices, in either precision."""
        sizes = {
            int(self._replayed.requested_bytes[block])
            for block, call in self._forward_calls
            if _SOFTMAX.search(call.stack.text)
        }
        return frozenset(sizes | {2 * size for size in sizes} | {size // 2 for size in sizes})

    @cached_property
    def _checkpointing(self) -> bool:
        return any(
            (call.stamp is not None and call.stamp.recompute) or _CHECKPOINT.search(call.stack.text) is not None
            for call in self._all_calls
        )

    @cached_property
    def _last_checkpointed_block(self) -> dict[int, int]:
        """The last block that a checkpointed layer made, by run."""
        made = self._replayed.allocated_by
        return {
            self._timeline.run_at(int(made[block])): block
            for block, call in self._forward_calls
            if _CHECKPOINT.search(call.stack.text)
        }

    @cached_property
    def _modules(self) -> frozenset[str]:
        return frozenset(call.stamp.module for call in self._all_calls if call.stamp)

    @cached_property
    def _last_layer(self) -> int:
        found = (_LAYER.search(module) for module in self._modules)
        return max((int(match.group(1)) for match in found if match), default=-1)

    @cached_property
    def _bodies(self) -> frozenset[str]:
        """Modules that hold the decoder layers."""
        found = (_BODY.match(module) for module in self._modules)
        return frozenset(match.group(1) for match in found if match)

    @cached_property
    def _loss_modules(self) -> frozenset[str]:
        """The head, the modules around it, and the loss."""
        heads = [module for module in self._modules if module.endswith(_HEADS)]
        around = {".".join(head.split(".")[:depth]) for head in heads for depth in range(head.count(".") + 2)}
        return frozenset({"", "loss"} | around) - self._bodies


def _is_head_output(call: _Call) -> bool:
    """Whether the head's own matrix product ran, no fused loss in its place."""
    if call.stamp is None or not call.stamp.module:
        return call.stack.in_head
    return call.stamp.module.endswith(_HEADS) and (not call.stack.calls or call.stack.in_linear)


def _is_shifted(size: int, plane: int) -> bool:
    """Whether `size` is `plane` less one token of each sequence."""
    return plane // 2 < size < plane and plane % (plane - size) == 0
