"""Who asked for each block: stacks and stamps, told apart once for all the blocks that share them."""

import re
from dataclasses import dataclass

import numpy as np

from ligerprof.analyzers.attribution_stacks import Stack, StackReader
from ligerprof.snapshots.replay import Int64s, Replay
from ligerprof.snapshots.stamp import Stamp

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What asked for blocks.

    Attributes:
        stamp: our own, None where the recorder left none.
    """

    stack: Stack
    stamp: Stamp | None

    @property
    def module(self) -> str:
        """Dotted module name, "" where unknown."""
        return self.stamp.module if self.stamp else ""

    @property
    def node(self) -> str:
        """The autograd node that ran, or ""."""
        return self.stamp.node if self.stamp and self.stamp.node else self.stack.node

    @property
    def recomputes(self) -> bool:
        """Whether a checkpointed forward ran again inside backward."""
        return self.stamp.recompute if self.stamp else self.stack.recomputes

    @property
    def layer(self) -> int | None:
        """Index of the decoder layer in the module's name."""
        match = _LAYER.search(self.module)
        return int(match.group(1)) if match else None

    @property
    def shown(self) -> str:
        """The call or node that says most."""
        return self.stack.shown or self.node

    @property
    def is_known(self) -> bool:
        """Whether anything is known of who asked."""
        return self.stamp is not None or bool(self.stack.calls or self.stack.node)


class Requests:
    """The requests behind a device's blocks, and the calls that consecutive blocks share.

    Attributes:
        kinds: requests that differ.
        kind_of: index into `kinds` for each block.
        place: how many blocks the same call had made before each block.
        count: how many blocks that call made in all.
        next_call: index of the event with which the next call began to allocate, past the end for the last.
    """

    def __init__(self, replayed: Replay) -> None:
        self.kinds: list[Request] = []
        self._kinds_by_block = self._tell_apart(replayed)
        self.kind_of = np.array(self._kinds_by_block, dtype=np.int64)
        self.place, self.count, self.next_call = self._group(replayed)

    def of(self, block: int) -> Request:
        """The request behind a block."""
        return self.kinds[self._kinds_by_block[block]]

    def _tell_apart(self, replayed: Replay) -> list[int]:
        reader = StackReader()
        known: dict[tuple[int, object], int] = {}
        kinds: list[int] = []
        for block, event in enumerate(replayed.allocated_by.tolist()):
            asked = replayed.trace[event] if event >= 0 else {"frames": replayed.frames_of(block)}
            frames, text = asked.get("frames"), asked.get("user_metadata")
            if not isinstance(text, str):
                text = None
            # frames live as long as the trace does, so their ids stay theirs
            key = (id(frames) if frames else 0, text)
            kind = known.get(key)
            if kind is None:
                kind = known[key] = len(self.kinds)
                self.kinds.append(Request(stack=reader.read(frames), stamp=Stamp.parse(text) if text else None))
            kinds.append(kind)
        return kinds

    def _group(self, replayed: Replay) -> tuple[Int64s, Int64s, Int64s]:
        """Runs of blocks that one call made, each call known by stack, node and stamp."""
        numbers: dict[object, int] = {}
        calls = [
            numbers.setdefault((kind.stack.calls, kind.stack.node, kind.stamp), len(numbers)) for kind in self.kinds
        ]
        if not calls:
            return self.kind_of, self.kind_of, self.kind_of
        call_of = np.array(calls, dtype=np.int64)[self.kind_of]
        starts = np.flatnonzero(np.append(True, np.diff(call_of)))
        ends = np.append(starts[1:], len(call_of))
        lengths = ends - starts
        made = np.append(replayed.allocated_by, len(replayed.trace))
        place = np.arange(len(call_of)) - np.repeat(starts, lengths)
        return place, np.repeat(lengths, lengths), np.repeat(made[ends], lengths)
