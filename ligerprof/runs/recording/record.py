"""Record the memory of a user's own training loop: `ligerprof.record(directory)`."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ligerprof.errors import LigerprofError, MissingDependencyError, RunDirectoryError
from ligerprof.files import require_absent
from ligerprof.roles import Phase
from ligerprof.runs.directory import RunDirectory
from ligerprof.runs.recording.phases import LoopPhases
from ligerprof.runs.recording.saved import SavedTensors, locate_on_cuda, unix_time_us
from ligerprof.snapshots.saved import with_saved_tensors

Stacks = Literal["python", "all"]
MAX_ENTRIES = 1_000_000


class CudaHistory:
    """The history of torch's CUDA caching allocator; a recorder accepts any object with these methods.

    Raises:
        MissingDependencyError: no CUDA device.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise MissingDependencyError(
                "record: no CUDA device to record. `ligerprof step --device simulated` does not need one."
            )
        cuda: Any = torch.cuda
        # creates the allocator, which the observer needs
        cuda.init()
        self._memory = cuda.memory

    def start(self, *, max_entries: int, stacks: Stacks) -> None:
        """Start recording events; only the newest `max_entries` are kept."""
        # context="all" would break non-reentrant checkpointing around Python autograd Functions
        self._memory._record_memory_history(max_entries=max_entries, stacks=stacks, context="alloc")

    def stop(self) -> None:
        """Stop recording and drop the events."""
        self._memory._set_memory_metadata("")
        self._memory._record_memory_history(enabled=None)

    def stamp(self, text: str) -> None:
        """Attach a text to the events that follow."""
        self._memory._set_memory_metadata(text)

    def snapshot(self) -> dict[str, Any]:
        """The recording, as torch.cuda.memory._snapshot() returns it."""
        taken: dict[str, Any] = self._memory._snapshot()
        return taken

    def locate(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[int, int] | None:
        """Device and address of a tensor's storage; None if it is not in CUDA memory."""
        return locate_on_cuda(tensor, storage)

    def now_us(self) -> int:
        """The time by the clock of the events."""
        return unix_time_us()

    def observe_out_of_memory(self, observer: Callable[[], None]) -> None:
        """Call `observer` when an allocation fails, before the exception is raised."""
        bindings: Any = torch._C
        bindings._cuda_attach_out_of_memory_observer(lambda *_figures: observer())


class Recorder:
    """Records from `open` to `close`, and writes snapshot.pickle on `close`, or earlier if memory runs out.

    The arguments and exceptions are those of `record`.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        history: CudaHistory,
        stacks: Stacks = "python",
        max_entries: int = MAX_ENTRIES,
        force: bool = False,
    ) -> None:
        self._run = RunDirectory(path=Path(directory))
        self._history, self._stacks, self._max_entries, self._force = history, stacks, max_entries, force
        self._phases: LoopPhases | None = None
        self._saved = SavedTensors(locate=history.locate, clock=history.now_us)
        self._ran_out = False
        try:
            self._run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(
                f"{directory}: cannot create the directory ({error.strerror}). Record into another."
            ) from None
        require_absent([self.snapshot_path], force=force, flag="force=True")

    @property
    def snapshot_path(self) -> Path:
        """The file for `ligerprof explain`, written at the end of the recording."""
        return self._run.snapshot

    @property
    def is_open(self) -> bool:
        """Whether the recorder is recording."""
        return self._phases is not None

    def open(self) -> "Recorder":
        """Start recording."""
        self._history.start(max_entries=self._max_entries, stacks=self._stacks)
        self._phases = LoopPhases(self._history.stamp, self._saved)
        self._phases.open()
        self._history.observe_out_of_memory(self._save_out_of_memory)
        return self

    def close(self, failure: BaseException | None = None) -> None:
        """Stop recording and write the snapshot.

        Args:
            failure: the exception that ended the loop, if any. A snapshot written when memory ran out is then
                kept, and one that cannot be written only causes a warning.

        Raises:
            OutputError: the snapshot cannot be written, or another process wrote one in the meantime.
        """
        if self._phases is None:
            return
        self._phases.close()
        self._phases = None
        try:
            if not (self._ran_out and isinstance(failure, torch.OutOfMemoryError)):
                self._write()
        except LigerprofError as error:
            if failure is None:
                raise
            warnings.warn(f"the recording is lost: {error}", stacklevel=2)
        finally:
            self._history.stop()

    def attach(self, model: nn.Module) -> None:
        """Attribute allocations to the modules of `model`, by default the first module that runs."""
        self._open_phases().attach(model)

    def step(self) -> None:
        """End a training step; not needed after a torch optimizer's `step`."""
        self._open_phases().end_step()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Set the phase inside a context: `forward`, `backward`, `optimizer`, `build` or `outside`."""
        try:
            phase = Phase(name)
        except ValueError:
            known = ", ".join(phase.value for phase in Phase)
            raise LigerprofError(f"record: unknown phase {name!r}. Known: {known}.") from None
        with self._open_phases().phase(phase):
            yield

    def _open_phases(self) -> LoopPhases:
        if self._phases is None:
            raise LigerprofError("record: the recording has ended. Use the recorder inside its `with` block.")
        return self._phases

    def _write(self) -> None:
        # if memory ran out before, this recorder wrote the existing snapshot
        snapshot = with_saved_tensors(self._history.snapshot(), self._saved.rows)
        self._run.write_snapshot(snapshot, force=self._force or self._ran_out)

    def _save_out_of_memory(self) -> None:
        """Write the snapshot while the memory is in use; torch cannot remove observers, so later calls return."""
        if self._phases is None or self._ran_out:
            return
        try:
            self._write()
            self._ran_out = True
        except LigerprofError as error:
            warnings.warn(f"out of memory, and the snapshot cannot be written: {error}", stacklevel=2)


@contextmanager
def record(
    directory: str | Path,
    *,
    model: nn.Module | None = None,
    stacks: Stacks = "python",
    max_entries: int = MAX_ENTRIES,
    force: bool = False,
) -> Iterator[Recorder]:
    """Record the CUDA memory of a training loop; `ligerprof explain DIRECTORY` shows what the peak consisted of.

        with ligerprof.record("out", model=model):
            for batch in batches:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    Hooks detect forward, backward and optimizer steps. If memory runs out, the snapshot is written before the
    exception is raised.

    Args:
        directory: the folder for snapshot.pickle, created if missing.
        model: the model whose modules are named; None: the first module that runs.
        stacks: `python`, or `all` with C++ frames, which cost more.
        max_entries: number of events to keep, the newest.
        force: overwrite an existing snapshot.

    Raises:
        MissingDependencyError: no CUDA device.
        OutputError: the directory already contains a snapshot, or the snapshot cannot be written.
        RunDirectoryError: the directory cannot be created.
    """
    recorder = Recorder(directory, history=CudaHistory(), stacks=stacks, max_entries=max_entries, force=force)
    with running(recorder, model):
        yield recorder


@contextmanager
def running(recorder: Recorder, model: nn.Module | None = None) -> Iterator[Recorder]:
    """Open a recorder for a block and close it at the end, also after an exception."""
    recorder.open()
    try:
        if model is not None:
            recorder.attach(model)
        yield recorder
    except BaseException as failure:
        recorder.close(failure)
        raise
    recorder.close()
