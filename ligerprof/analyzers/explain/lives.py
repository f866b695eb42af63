"""Choose the blocks of a recording that are listed one by one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ligerprof.snapshots.distinct import distinct
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

MOST_LISTED = 30_000
_MOST_AT_A_MOMENT = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLives:
    """Some blocks of a recording.

    Attributes:
        blocks: indices into the replay's blocks, ascending.
        least_bytes: every block that requested at least this much is among them; 0 if all blocks are.
    """

    blocks: Int64s
    least_bytes: int


def list_lives(replayed: Replay, moments: Sequence[int], *, most: int = MOST_LISTED) -> BlockLives:
    """The blocks that are live at the given moments, and the `most` largest of the recording.

    Beyond a limit, only the largest blocks of a moment are listed.
    """
    sizes = replayed.requested_bytes
    count, least_bytes = len(sizes), 0
    if count > most:
        # blocks of one size are listed together or not at all
        least_bytes = int(np.partition(sizes, count - most - 1)[count - most - 1]) + 1
    chosen = [np.flatnonzero(sizes >= least_bytes)]
    for moment in moments:
        live = replayed.live_at(moment)
        chosen.append(live[np.argsort(-sizes[live], kind="stable")[:_MOST_AT_A_MOMENT]])
    blocks = distinct(np.concatenate(chosen)).astype(np.int64)
    return BlockLives(blocks=blocks, least_bytes=least_bytes)
