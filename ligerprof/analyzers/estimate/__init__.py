"""What a training step will need, in closed form."""

from ligerprof.analyzers.estimate.closed_form import estimate
from ligerprof.analyzers.estimate.result import MemoryEstimate, Term

__all__ = ["MemoryEstimate", "Term", "estimate"]
