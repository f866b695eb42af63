"""Work out what the peak would be if a role held nothing, and name the change that does it."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ligerprof.analyzers.attribution.blocks import Owner
from ligerprof.analyzers.attribution.call_sites import Requests
from ligerprof.analyzers.explain.parts import WhatIf
from ligerprof.roles import Role
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

# less than this share of the peak is not worth a change
_LEAST_SHARE = 0.02
# no request is as large, and fewer kinds of request than this fit in a file
_SIZE_LIMIT = 2**44


# moments by their indices, or all of them
Window = Int64s | slice


class _Change(NamedTuple):
    roles: tuple[Role, ...]
    change: str
    option: str


_CHANGES = (
    _Change(
        (Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES),
        "a fused linear cross-entropy, which makes the logits chunk by chunk",
        "--liger flce",
    ),
    _Change((Role.OPTIMIZER_STATES,), "optimizer states in host memory", "--engine deepspeed --offload optimizer"),
    _Change((Role.ACTIVATIONS,), "gradient checkpointing, which keeps the inputs of layers alone", "--checkpointing"),
    _Change((Role.CHECKPOINTS,), "smaller micro-batches, more of them", "--batch 1 --grad-accum 4"),
    _Change((Role.ATTENTION_TEMPORARIES,), "attention without score matrices", "--attention sdpa"),
    _Change((Role.OPTIMIZER_TEMPORARIES,), "a fused optimizer, which makes none", "--optimizer adamw-fused"),
    _Change((Role.WEIGHT_CASTS,), "weights in 16 bit, which autocast need not copy", "--precision bf16"),
    _Change((Role.GRADIENTS,), "adapters in place of all weights", "--lora 16"),
    _Change((Role.PARAMETERS,), "weights in host memory", "--engine deepspeed --zero 3 --offload all"),
)


def what_if(replayed: Replay, requests: Requests, owners: Sequence[Owner], window: Window) -> tuple[WhatIf, ...]:
    """The peaks without each role that a change can do away with, the lowest first.

    Blocks at other moments count to a role where a block at the peak that has it was asked for by the same
    code in the same size.

    Args:
        owners: of the blocks at the peak.
        window: the moments among which the peak is looked for.
    """
    peak_bytes = int(replayed.allocated_bytes[window].max())
    likes = _likes(replayed, requests)
    blocks_of: dict[Role, list[int]] = defaultdict(list)
    for owner in owners:
        blocks_of[owner.role].append(owner.block)
    answers = []
    for roles, change, option in _CHANGES:
        present = tuple(role for role in roles if role in blocks_of)
        blocks = [block for role in present for block in blocks_of[role]]
        if int(replayed.block_bytes[blocks].sum() if blocks else 0) < _LEAST_SHARE * peak_bytes:
            continue
        is_gone = np.zeros(len(likes), dtype=bool)
        is_gone[likes[blocks]] = True
        rest = int((replayed.allocated_bytes - _held_by(replayed, np.flatnonzero(is_gone[likes])))[window].max())
        answers.append(
            WhatIf(without=present, peak_bytes=rest, saved_bytes=peak_bytes - rest, change=change, option=option)
        )
    return tuple(sorted(answers, key=lambda answer: answer.peak_bytes))


def _likes(replayed: Replay, requests: Requests) -> Int64s:
    """A number for each block, less than there are blocks; the same for the same code, module and size in any step."""
    numbers: dict[object, int] = {}
    of_kind = [
        numbers.setdefault((kind.stack.calls, kind.node, kind.module, kind.recomputes), len(numbers))
        for kind in requests.kinds
    ]
    asked = np.array(of_kind, dtype=np.int64)[requests.kind_of] * _SIZE_LIMIT + replayed.requested_bytes
    likes: Int64s = np.unique(asked, return_inverse=True)[1]
    return likes


def _held_by(replayed: Replay, blocks: Int64s) -> Int64s:
    """Allocated bytes of some blocks at each moment."""
    made, freed, sizes = replayed.allocated_by[blocks], replayed.freed_by[blocks], replayed.block_bytes[blocks]
    changes = np.zeros(replayed.last_moment + 1, dtype=np.int64)
    changes[0] = sizes[made < 0].sum()
    # an event makes or frees one block
    changes[made[made >= 0] + 1] = sizes[made >= 0]
    changes[freed[freed >= 0] + 1] = -sizes[freed >= 0]
    return np.cumsum(changes)
