"""DeepSpeed without its compiled operators, which update weights in main memory: they have no values here."""

from types import SimpleNamespace
from typing import Any

from ligerprof.runs.recording.imports import after_import_or_now


def install() -> None:
    """Replace the operators when the program imports them."""
    after_import_or_now(
        "deepspeed.ops.adam.cpu_adam", lambda module: setattr(module, "CPUAdamBuilder", _UncompiledAdam)
    )


class _UncompiledAdam:
    """DeepSpeed's builder of DeepSpeedCPUAdam's operator, which returns one that does nothing."""

    def load(self) -> Any:
        """The operator's module."""
        return SimpleNamespace(**dict.fromkeys(("create_adam", "adam_update", "destroy_adam"), lambda *_: None))
