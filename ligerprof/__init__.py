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

from ligerprof.lazy_names import lazy_names
from ligerprof.text import Printed
from ligerprof.version import __version__ as __version__

if TYPE_CHECKING:
    from ligerprof import kernels as kernels
    from ligerprof.analyzers.compare import Comparison as Comparison
    from ligerprof.analyzers.estimate import MemoryEstimate as MemoryEstimate
    from ligerprof.analyzers.explain.peak import PeakDiff as PeakDiff
    from ligerprof.analyzers.explain.peak import PeakReport as PeakReport
    from ligerprof.analyzers.search.changes import Advice as Advice
    from ligerprof.analyzers.search.fit import Fit as Fit
    from ligerprof.analyzers.trace.analysis import TraceReport as TraceReport
    from ligerprof.errors import LigerprofError as LigerprofError
    from ligerprof.library import advise as advise
    from ligerprof.library import analyze_trace as analyze_trace
    from ligerprof.library import checkpoint as checkpoint
    from ligerprof.library import compare as compare
    from ligerprof.library import diff as diff
    from ligerprof.library import estimate as estimate
    from ligerprof.library import explain as explain
    from ligerprof.library import fit as fit
    from ligerprof.library import plan as plan
    from ligerprof.library import simulate as simulate
    from ligerprof.recipe.training import TrainingRecipe as TrainingRecipe
    from ligerprof.roles import MemoryBreakdown as MemoryBreakdown
    from ligerprof.roles import Phase as Phase
    from ligerprof.roles import Role as Role
    from ligerprof.runs.outcome import StepOutcome as StepOutcome
    from ligerprof.runs.recording.axolotl_plugin import AxolotlPlugin as AxolotlPlugin
    from ligerprof.runs.recording.record import record as record
    from ligerprof.runs.recording.trainer_callback import RecordCallback as RecordCallback

_NAMES = {
    "analyzers.compare": ("Comparison",),
    "analyzers.estimate": ("MemoryEstimate",),
    "analyzers.explain.peak": ("PeakDiff", "PeakReport"),
    "analyzers.search.changes": ("Advice",),
    "analyzers.search.fit": ("Fit",),
    "analyzers.trace.analysis": ("TraceReport",),
    "errors": ("LigerprofError",),
    "kernels": ("kernels",),
    "library": (
        *("advise", "analyze_trace", "checkpoint", "compare", "diff"),
        *("estimate", "explain", "fit", "plan", "simulate"),
    ),
    "recipe.training": ("TrainingRecipe",),
    "roles": ("MemoryBreakdown", "Phase", "Role"),
    "runs.outcome": ("StepOutcome",),
    "runs.recording.axolotl_plugin": ("AxolotlPlugin",),
    "runs.recording.record": ("record",),
    "runs.recording.trainer_callback": ("RecordCallback",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_HOMES)

__getattr__ = lazy_names(__name__, _HOMES)
Printed.reports = lambda: import_module("ligerprof.reports.shown")


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext ligerprof` calls in a notebook."""
    from ligerprof.notebook import register

    register(shell)
