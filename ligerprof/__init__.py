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

_HOMES = {
    "Advice": "analyzers.search.changes",
    "AxolotlPlugin": "runs.recording.axolotl_plugin",
    "Comparison": "analyzers.compare",
    "Fit": "analyzers.search.fit",
    "LigerprofError": "errors",
    "MemoryBreakdown": "roles",
    "MemoryEstimate": "analyzers.estimate",
    "PeakDiff": "analyzers.explain.peak",
    "PeakReport": "analyzers.explain.peak",
    "Phase": "roles",
    "RecordCallback": "runs.recording.trainer_callback",
    "Role": "roles",
    "StepOutcome": "runs.outcome",
    "TraceReport": "analyzers.trace.analysis",
    "TrainingRecipe": "recipe.training",
    "advise": "library",
    "analyze_trace": "library",
    "checkpoint": "library",
    "compare": "library",
    "diff": "library",
    "estimate": "library",
    "explain": "library",
    "fit": "library",
    "kernels": "kernels",
    "plan": "library",
    "record": "runs.recording.record",
    "simulate": "library",
}
__all__ = list(_HOMES)

__getattr__ = lazy_names(__name__, _HOMES)
Printed.reports = lambda: import_module("ligerprof.reports.shown")


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext ligerprof` calls in a notebook."""
    from ligerprof.notebook import register

    register(shell)
