"""The analytic estimate of what a training step will need."""

from ligerprof.analyzers.estimate.analytic import (
    estimate,
    estimated_peak_bytes,
    judged,
    kernel_calls,
    require_host_memory,
)
from ligerprof.analyzers.estimate.headroom import Headroom, find_headroom, headroom_note, settle_flce_budget
from ligerprof.analyzers.estimate.judge import Answer, judge
from ligerprof.analyzers.estimate.result import FitVerdict, HostVerdict, MainMemory, MemoryEstimate, Moment, Term

__all__ = [
    "Answer",
    "FitVerdict",
    "Headroom",
    "HostVerdict",
    "MainMemory",
    "MemoryEstimate",
    "Moment",
    "Term",
    "estimate",
    "estimated_peak_bytes",
    "find_headroom",
    "headroom_note",
    "judge",
    "judged",
    "kernel_calls",
    "require_host_memory",
    "settle_flce_budget",
]
