"""Memory analysis and profiling for LLM training, with pluggable kernels.

    import ligerprof

    recipe = ligerprof.TrainingRecipe(model="llama3.2-1b", batch=4, seq=1024, liger="flce")
    print(ligerprof.estimate(recipe).peak_bytes)
    print(ligerprof.simulate(recipe).peak_bytes)
    print(ligerprof.explain("snapshot.pickle").roles)

Everything here loads when it is first used: importing ligerprof imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ligerprof.analyzers.estimate import MemoryEstimate, estimate
    from ligerprof.analyzers.explain.analysis import explain
    from ligerprof.analyzers.explain.peak import PeakReport
    from ligerprof.errors import LigerprofError
    from ligerprof.recipe.training import TrainingRecipe
    from ligerprof.roles import MemoryBreakdown, Phase, Role
    from ligerprof.runs.outcome import StepOutcome
    from ligerprof.runs.recording.record import record
    from ligerprof.runs.simulated import simulate_step as simulate

__version__ = "0.1.0"

_HOMES = {
    "LigerprofError": ("ligerprof.errors", "LigerprofError"),
    "MemoryBreakdown": ("ligerprof.roles", "MemoryBreakdown"),
    "MemoryEstimate": ("ligerprof.analyzers.estimate", "MemoryEstimate"),
    "PeakReport": ("ligerprof.analyzers.explain.peak", "PeakReport"),
    "Phase": ("ligerprof.roles", "Phase"),
    "Role": ("ligerprof.roles", "Role"),
    "StepOutcome": ("ligerprof.runs.outcome", "StepOutcome"),
    "TrainingRecipe": ("ligerprof.recipe.training", "TrainingRecipe"),
    "estimate": ("ligerprof.analyzers.estimate", "estimate"),
    "explain": ("ligerprof.analyzers.explain.analysis", "explain"),
    "record": ("ligerprof.runs.recording.record", "record"),
    "simulate": ("ligerprof.runs.simulated", "simulate_step"),
}

__all__ = [
    "LigerprofError",
    "MemoryBreakdown",
    "MemoryEstimate",
    "PeakReport",
    "Phase",
    "Role",
    "StepOutcome",
    "TrainingRecipe",
    "estimate",
    "explain",
    "record",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ligerprof' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
