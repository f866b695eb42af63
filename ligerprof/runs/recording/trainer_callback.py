"""A callback that records transformers' Trainer, as `ligerprof.record` does for a training loop."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ligerprof.runs.recording.record import MAX_ENTRIES, CudaHistory, Recorder, Stacks


class RecordCallback(TrainerCallback):
    """Records from the start of training to its end, or until memory runs out; arguments as for `ligerprof.record`.

    Trainer(..., callbacks=[RecordCallback("out")]).train()
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        stacks: Stacks = "all",
        max_entries: int = MAX_ENTRIES,
        force: bool = False,
        history: CudaHistory | None = None,
    ) -> None:
        self._recorder = Recorder(
            directory, history=history or CudaHistory(), stacks=stacks, max_entries=max_entries, force=force
        )
        self._ended = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - transformers' signature
        """Start recording; training that restarts, with a smaller batch for example, continues the same recording."""
        if not self._ended and not self._recorder.is_open:
            self._recorder.open().attach(kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - transformers' signature
        self._recorder.close()
        self._ended = True
