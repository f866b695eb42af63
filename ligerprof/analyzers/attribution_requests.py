"""Who asked for each block: stacks and stamps, told apart once for all the blocks that share them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
        """The kind of each block; stacks and stamps are told by identity first, for they are shared by the thousand."""
        asked = [
            replayed.trace[event] if event >= 0 else {"frames": replayed.frames_of(block)}
            for block, event in enumerate(replayed.allocated_by.tolist())
        ]
        frames, texts = [one.get("frames") for one in asked], [one.get("user_metadata") for one in asked]
        # all of it lives as long as the trace does, so identities stay what they are
        pairs = _numbered(frames) * len(asked) + _numbered(texts)
        _, first, kinds_of_pairs = np.unique(pairs, return_index=True, return_inverse=True)
        reader = StackReader()
        known: dict[tuple[int, str | None], int] = {}
        kinds = np.zeros(len(first), dtype=np.int64)
        for pair in np.argsort(first).tolist():
            stack, text = frames[first[pair]], texts[first[pair]]
            key = (id(stack) if stack else 0, text if isinstance(text, str) else None)
            if key not in known:
                known[key] = len(self.kinds)
                stamp = Stamp.parse(key[1]) if key[1] else None
                self.kinds.append(Request(stack=reader.read(stack), stamp=stamp))
            kinds[pair] = known[key]
        numbers: list[int] = kinds[kinds_of_pairs].tolist()
        return numbers

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


def _numbered(values: Sequence[Any]) -> Int64s:
    """A small number for each value, the same for the same object."""
    identities = np.fromiter(map(id, values), dtype=np.int64, count=len(values))
    return np.unique(identities, return_inverse=True)[1].astype(np.int64)
