"""What the second step holds, where memory ran out in the first optimizer step.

Its forward and backward passes hold the optimizer states, which those of the first step did not. A program that calls
`zero_grad()` only after its forward pass also holds the gradients of the first step until then. In the first step there
were none, but torch annotates the call.
"""

from dataclasses import dataclass

import numpy as np

from ligerprof.analyzers.suggestions.case import Case
from ligerprof.analyzers.suggestions.rows import Row
from ligerprof.roles import Phase, Role

# of what is reserved, the part that may be free in pieces too small for any request
_FRAGMENTED_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class NextStep:
    """Allocated bytes of the second step's forward and backward passes.

    Attributes:
        peak_bytes: the highest, if gradients are freed before the forward pass.
        with_gradients_bytes: the highest if it holds the gradients of the first step until `zero_grad()`; 0 if the
            program is not known to call it late.
        limit_bytes: allocated bytes that fit.
    """

    peak_bytes: int
    with_gradients_bytes: int
    limit_bytes: int

    @property
    def fits(self) -> bool:
        """Whether it fits once gradients are freed in time."""
        return self.peak_bytes <= self.limit_bytes

    @property
    def must_free_gradients(self) -> bool:
        """Whether it fits only, or only perhaps, once gradients are freed in time."""
        return self.fits and self.with_gradients_bytes > self.limit_bytes * (1 - _FRAGMENTED_SHARE)


def find_next_step(row: Row, case: Case) -> NextStep | None:
    """The step after a failure in the first optimizer step with a row's change; None for any other failure."""
    forwards, backwards = case.spans_of_phase(Phase.FORWARD), case.backwards
    optimizer = [start for start, _ in case.spans_of_phase(Phase.OPTIMIZER)]
    request = case.request
    if request is None or not (forwards and backwards and optimizer):
        return None
    first, backward, start = forwards[0][0], backwards[0][0], optimizer[0]
    if not first < backward < start or start < forwards[-1][0] or request.moment < start:
        return None
    _ = case.gradients
    case.book.learn(start)
    case.book.learn(request.moment)
    edit = row.edit(case)
    if edit is None:
        return None
    # each thread's workspace is allocated once and stays
    workspaces = case.book.live(start, Role.LIBRARY_WORKSPACE)
    begins = edit.starts(workspaces)
    edit.hold(case.replayed.block_bytes[workspaces], np.minimum(first, begins), begins)
    after = edit.allocated_bytes(None)
    temporary = () if Role.OPTIMIZER_TEMPORARIES in row.without else (Role.OPTIMIZER_TEMPORARIES,)
    states_bytes = max(0, int(after[request.moment] - after[start]) - case.book.bytes_at(request.moment, *temporary))
    zeroed = case.attribution.phases.zero_grad_starts
    held_bytes = 0
    if ((first < zeroed) & (zeroed <= backward)).any():
        gradients = () if Role.GRADIENTS in row.without else (Role.GRADIENTS,)
        held_bytes = int(np.max(after[first : backward + 1])) + states_bytes + case.book.bytes_at(start, *gradients)
    return NextStep(
        peak_bytes=int(np.max(after[first : start + 1])) + states_bytes,
        with_gradients_bytes=held_bytes,
        limit_bytes=request.limit_bytes,
    )
