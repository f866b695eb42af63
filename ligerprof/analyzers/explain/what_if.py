"""Compute the peak without each role, and name the change that removes the role."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ligerprof.analyzers.attribution.blocks import Owner
from ligerprof.analyzers.attribution.call_sites import CallSites
from ligerprof.analyzers.explain.timeline import held_bytes
from ligerprof.roles import Role
from ligerprof.serialization import select
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Int64s

# a smaller share of the peak is not worth a change
_LEAST_SHARE = 0.02
# larger than any request, and small enough to be multiplied by the number of call sites
_SIZE_LIMIT = 2**44

# indices of moments, or all moments
Window = Int64s | slice


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """The peak without some roles.

    Attributes:
        change: the change that removes the roles.
        option: the option of `ligerprof step` for that change.
    """

    without: tuple[Role, ...]
    peak_bytes: int
    saved_bytes: int
    change: str
    option: str

    def to_json(self) -> dict[str, Any]:
        """An entry of `what_if` in the JSON."""
        figures = select(self, "without", "peak_bytes", "saved_bytes", "change")
        return {**figures, "command": f"ligerprof step {self.option}"}


class _Change(NamedTuple):
    roles: tuple[Role, ...]
    change: str
    option: str


_CHANGES = (
    _Change(
        (Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES),
        "a fused linear cross-entropy, which computes the logits chunk by chunk",
        "--liger flce",
    ),
    _Change((Role.OPTIMIZER_STATES,), "optimizer states in host memory", "--engine deepspeed --offload optimizer"),
    _Change((Role.ACTIVATIONS,), "gradient checkpointing, which keeps only the inputs of layers", "--checkpointing"),
    _Change((Role.CHECKPOINTS,), "smaller micro-batches and more of them", "--batch 1 --grad-accum 4"),
    _Change((Role.ATTENTION_TEMPORARIES,), "attention without score matrices", "--attention sdpa"),
    _Change((Role.OPTIMIZER_TEMPORARIES,), "a fused optimizer, which allocates none", "--optimizer adamw-fused"),
    _Change((Role.WEIGHT_CASTS,), "16-bit weights, which autocast does not copy", "--precision bf16"),
    _Change((Role.GRADIENTS,), "adapters instead of all weights", "--lora 16"),
    _Change((Role.PARAMETERS,), "weights in host memory", "--engine deepspeed --zero 3 --offload all"),
)


def find_what_ifs(
    replayed: Replay, call_sites: CallSites, owners: Sequence[Owner], window: Window
) -> tuple[WhatIf, ...]:
    """The peak without each role that a change can remove, the lowest first.

    At other moments, a block has a role if a block at the peak has this role, call site and size.

    Args:
        owners: owners of the blocks at the peak.
        window: the moments that are searched for the peak.
    """
    peak_bytes = int(replayed.allocated_bytes[window].max())
    alike = _number_alike(replayed, call_sites)
    blocks_of: dict[Role, list[int]] = defaultdict(list)
    for owner in owners:
        blocks_of[owner.role].append(owner.block)
    found = []
    for roles, change, option in _CHANGES:
        present = tuple(role for role in roles if role in blocks_of)
        blocks = [block for role in present for block in blocks_of[role]]
        if int(replayed.block_bytes[blocks].sum() if blocks else 0) < _LEAST_SHARE * peak_bytes:
            continue
        is_gone = np.zeros(len(alike), dtype=bool)
        is_gone[alike[blocks]] = True
        gone = np.flatnonzero(is_gone[alike]).astype(np.int64)
        left = int((replayed.allocated_bytes - held_bytes(replayed, gone, replayed.block_bytes[gone]))[window].max())
        found.append(
            WhatIf(without=present, peak_bytes=left, saved_bytes=peak_bytes - left, change=change, option=option)
        )
    return tuple(sorted(found, key=lambda one: one.peak_bytes))


def _number_alike(replayed: Replay, call_sites: CallSites) -> Int64s:
    """A number for each block, below the number of blocks; equal for the same place and size in any step."""
    alike: Int64s = np.unique(call_sites.place_of * _SIZE_LIMIT + replayed.requested_bytes, return_inverse=True)[1]
    return alike
