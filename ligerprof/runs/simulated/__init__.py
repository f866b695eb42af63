"""The training step without a GPU: real model code, in a process whose `cuda` is the simulated GPU."""

from typing import TYPE_CHECKING, Any

from ligerprof.lazy_names import lazy_names
from ligerprof.snapshots.collector import collector_paused

if TYPE_CHECKING:
    from ligerprof.runs.simulated.worker import simulate_step

__all__ = ["simulate_step"]

_load = lazy_names(__name__, {"simulate_step": "worker"})


def __getattr__(name: str) -> Any:
    # torch and transformers create so many objects that the collector's walks take a fifth of their import
    with collector_paused():
        return _load(name)
