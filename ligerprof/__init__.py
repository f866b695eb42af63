"""Memory analysis and profiling for LLM training, with pluggable kernels.

    import ligerprof

    recipe = ligerprof.TrainingRecipe(model="llama3.2-1b", batch=4, seq=1024, liger="flce")
    print(ligerprof.estimate(recipe).peak_bytes)
    print(ligerprof.simulate(recipe).peak_bytes)
    print(ligerprof.explain("snapshot.pickle").roles)

Each name is loaded on first use, so importing ligerprof does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ligerprof.analyzers.estimate import MemoryEstimate as MemoryEstimate
    from ligerprof.analyzers.estimate import estimate as estimate
    from ligerprof.analyzers.explain.analysis import explain as explain
    from ligerprof.analyzers.explain.peak import PeakReport as PeakReport
    from ligerprof.errors import LigerprofError as LigerprofError
    from ligerprof.recipe.training import TrainingRecipe as TrainingRecipe
    from ligerprof.roles import MemoryBreakdown as MemoryBreakdown
    from ligerprof.roles import Phase as Phase
    from ligerprof.roles import Role as Role
    from ligerprof.runs.outcome import StepOutcome as StepOutcome
    from ligerprof.runs.recording.axolotl_plugin import AxolotlPlugin as AxolotlPlugin
    from ligerprof.runs.recording.record import record as record
    from ligerprof.runs.recording.trainer_callback import RecordCallback as RecordCallback
    from ligerprof.runs.simulated import simulate_step as simulate  # noqa: F401 - a public name

__version__ = "0.1.0"

_HOMES = {
    "AxolotlPlugin": "ligerprof.runs.recording.axolotl_plugin",
    "LigerprofError": "ligerprof.errors",
    "MemoryBreakdown": "ligerprof.roles",
    "MemoryEstimate": "ligerprof.analyzers.estimate",
    "PeakReport": "ligerprof.analyzers.explain.peak",
    "Phase": "ligerprof.roles",
    "RecordCallback": "ligerprof.runs.recording.trainer_callback",
    "Role": "ligerprof.roles",
    "StepOutcome": "ligerprof.runs.outcome",
    "TrainingRecipe": "ligerprof.recipe.training",
    "estimate": "ligerprof.analyzers.estimate",
    "explain": "ligerprof.analyzers.explain.analysis",
    "record": "ligerprof.runs.recording.record",
    "simulate": "ligerprof.runs.simulated",
}
__all__ = list(_HOMES)
_NAMES = {"simulate": "simulate_step"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ligerprof' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), _NAMES.get(name, name))
