"""Who asked for each block: stacks and stamps, told apart once for all the blocks that share them."""

from dataclasses import dataclass

import numpy as np

from ligerprof.analyzers.attribution.stacks import Stack, StackReader
from ligerprof.models.module_names import layer_index
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.stamp import Stamp
from ligerprof.snapshots.trace import Int64s


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
        return layer_index(self.module)

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
        self.kind_of = self._tell_apart(replayed)
        self._kinds_by_block: list[int] = self.kind_of.tolist()
        self.place, self.count, self.next_call = self._group(replayed)

    def of(self, block: int) -> Request:
        """The request behind a block."""
        return self.kinds[self._kinds_by_block[block]]

    def _tell_apart(self, replayed: Replay) -> Int64s:
        """The kind of each block; stacks and stamps are told by identity first, for they are shared by the thousand."""
        older = [block.frames for block in replayed.older_blocks]
        made = replayed.allocated_by[len(older) :]
        frame_codes, frames = replayed.trace.objects("frames")
        text_codes, texts = replayed.trace.objects("user_metadata")
        frame_of = np.append(np.arange(len(older)) + len(frames), frame_codes[made])
        text_of = np.append(np.full(len(older), len(texts)), text_codes[made])
        frames, texts = [*frames, *older], [*texts, None]
        _, first, kind_of_pair = np.unique(frame_of * len(texts) + text_of, return_index=True, return_inverse=True)
        reader = StackReader()
        known: dict[tuple[int, str | None], int] = {}
        kinds = np.zeros(len(first), dtype=np.int64)
        for pair in np.argsort(first).tolist():
            # frames and stacks live as long as this runs, so that identities stay what they are
            stack, text = reader.read(frames[frame_of[first[pair]]]), texts[text_of[first[pair]]]
            key = (id(stack), text if isinstance(text, str) else None)
            if key not in known:
                known[key] = len(self.kinds)
                self.kinds.append(Request(stack=stack, stamp=Stamp.parse(key[1]) if key[1] else None))
            kinds[pair] = known[key]
        return kinds[kind_of_pair]

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
