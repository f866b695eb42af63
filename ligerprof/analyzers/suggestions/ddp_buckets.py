"""Whether DDP's first buckets live on into the second step, which differs from run to run.

In its second step, DDP builds its buckets anew, in the order in which gradients became ready, and drops the first ones.
A pending reduction may still hold these until the backward pass begins: then both are allocated in the forward pass.
"""

import numpy as np

from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.program import Framework
from ligerprof.analyzers.suggestions.replayed_change import Edit, peak_after
from ligerprof.analyzers.suggestions.row import Row

_FIRST = r"\A\S*nn/parallel/distributed\.py:_ddp_init_helper$"
_REBUILT = r"\A\S*nn/parallel/distributed\.py:_pre_forward$"
# nn/parallel/distributed.py: the smallest bucket; smaller tensors are maps of unused parameters
_LEAST_BUCKET_BYTES = 2**20


def peak_with_other_timing(row: Row, case: Case) -> int | None:
    """The new peak if the first buckets live shorter or longer than recorded; None without DDP."""
    if case.program.engine is not Framework.DDP or not row.keeps_buckets:
        return None
    other = peak_after(lambda: with_other_timing(row, case), case.book, case.window, case.request)
    return None if other is None else other[0]


def with_other_timing(row: Row, case: Case) -> Edit | None:
    """The row's effect, with the first buckets dropped before the others are built, or with both until backward."""
    edit, replayed = row.edit(case), case.replayed
    first, rebuilt = case.blocks_from(_FIRST), case.blocks_from(_REBUILT)
    rebuilt = rebuilt[case.sizes(rebuilt) >= _LEAST_BUCKET_BYTES]
    if edit is None or not len(first) or not len(rebuilt):
        return None
    built = int(edit.starts(rebuilt).min())
    sizes, stops = replayed.block_bytes[first], edit.stops(first)
    late = stops > built
    if late.any():
        edit.release(sizes[late], np.full(int(late.sum()), built), stops[late])
        return edit
    backward = next((start for start, _ in case.backwards if start >= built), None)
    if backward is None:
        return None
    made = case.allocated_within(case.gradients, backward, replayed.last_moment)
    until = int(replayed.allocated_by[made[0]]) if len(made) else backward
    edit.hold(sizes, stops, np.full(len(first), until + 1))
    return edit
