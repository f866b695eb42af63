"""A plug-in that records axolotl's training: `plugins: [ligerprof.AxolotlPlugin]` in its YAML."""

import atexit
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin

from ligerprof.runs.directory import create_rank_directory
from ligerprof.runs.recording.record import CudaHistory, Recorder
from ligerprof.runs.recording.summary import current_rank

_FOLDER = "ligerprof"


class AxolotlPlugin(BasePlugin):  # type: ignore[misc]
    """Records from the loading of the model to the end of training, into `output_dir/ligerprof/rank0` and so on."""

    def __init__(self, history: CudaHistory | None = None) -> None:
        super().__init__()
        self._history = history
        self._recorder: Recorder | None = None

    def pre_model_load(self, cfg: Any) -> None:
        """Start recording, before weights are on the device."""
        run = create_rank_directory(Path(cfg.output_dir) / _FOLDER, current_rank())
        self._recorder = Recorder(run.path, history=self._history or CudaHistory()).open()
        # training may fail
        atexit.register(self._recorder.close)

    def post_model_load(self, cfg: Any, model: Any) -> None:  # noqa: ARG002 - axolotl's signature
        """Name the modules of the model, its adapters included."""
        if self._recorder is not None and self._recorder.is_open:
            self._recorder.attach(model)

    def post_train(self, cfg: Any, model: Any) -> None:  # noqa: ARG002 - axolotl's signature
        if self._recorder is not None:
            self._recorder.close()
