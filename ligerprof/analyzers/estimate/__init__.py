"""The analytic estimate of what a training step will need."""

from ligerprof.analyzers.estimate.analytic import estimate, estimated_peak_bytes
from ligerprof.analyzers.estimate.headroom import Headroom, find_headroom, headroom_note, settle_flce_budget
from ligerprof.analyzers.estimate.result import MemoryEstimate, Term

__all__ = [
    "Headroom",
    "MemoryEstimate",
    "Term",
    "estimate",
    "estimated_peak_bytes",
    "find_headroom",
    "headroom_note",
    "settle_flce_budget",
]
