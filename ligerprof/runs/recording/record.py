"""Record the memory of a user's own training loop: `ligerprof.record(directory)`."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from ligerprof.errors import LigerprofError, MissingDependencyError, RunDirectoryError
from ligerprof.files import require_absent
from ligerprof.roles import Phase
from ligerprof.runs.directory import RunDirectory
from ligerprof.runs.recording.phases import LoopPhases

Stacks = Literal["python", "all"]
MAX_ENTRIES = 1_000_000


class History(Protocol):
    """The allocator's history, as the recorder uses torch.cuda.memory."""

    def start(self, *, max_entries: int, stacks: Stacks) -> None:
        """Record events from now on, the newest `max_entries` of them."""
        ...

    def stop(self) -> None:
        """Stop recording, and drop what was recorded."""
        ...

    def stamp(self, text: str) -> None:
        """Attach a text to the events that follow."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """The recording, as torch.cuda.memory._snapshot() returns it."""
        ...

    def observe_out_of_memory(self, observer: Callable[[], None]) -> None:
        """Call `observer` when an allocation fails, before the exception is raised."""
        ...


class CudaHistory:
    """The history of torch's CUDA caching allocator.

    Raises:
        MissingDependencyError: there is no CUDA device.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise MissingDependencyError(
                "record: there is no CUDA device to record. `ligerprof step --device simulated` needs none."
            )
        cuda: Any = torch.cuda
        # the observer needs an allocator that exists
        cuda.init()
        self._memory = cuda.memory

    def start(self, *, max_entries: int, stacks: Stacks) -> None:
        """Record events from now on, the newest `max_entries` of them."""
        # context="all" would break non-reentrant checkpointing around Python autograd Functions
        self._memory._record_memory_history(max_entries=max_entries, stacks=stacks, context="alloc")

    def stop(self) -> None:
        """Stop recording, and drop what was recorded."""
        self._memory._set_memory_metadata("")
        self._memory._record_memory_history(enabled=None)

    def stamp(self, text: str) -> None:
        """Attach a text to the events that follow."""
        self._memory._set_memory_metadata(text)

    def snapshot(self) -> dict[str, Any]:
        """The recording, as torch.cuda.memory._snapshot() returns it."""
        taken: dict[str, Any] = self._memory._snapshot()
        return taken

    def observe_out_of_memory(self, observer: Callable[[], None]) -> None:
        """Call `observer` when an allocation fails, before the exception is raised."""
        bindings: Any = torch._C
        bindings._cuda_attach_out_of_memory_observer(lambda *_figures: observer())


class Recorder:
    """Records from `open` to `close`, and then writes `snapshot.pickle`, or earlier if memory runs out.

    Args:
        directory: where the snapshot goes; created if needed.
        stacks: `python`, or `all` with C++ frames, which cost much more.
        max_entries: how many events are kept; the oldest are dropped.
        force: overwrite a snapshot that exists.
        history: the allocator's history.

    Raises:
        OutputError: the directory already holds a snapshot.
        RunDirectoryError: the directory cannot be created.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        history: History,
        stacks: Stacks = "python",
        max_entries: int = MAX_ENTRIES,
        force: bool = False,
    ) -> None:
        self._run = RunDirectory(path=Path(directory))
        self._history, self._stacks, self._max_entries, self._force = history, stacks, max_entries, force
        self._phases: LoopPhases | None = None
        self._ran_out = False
        self._make_room()

    @property
    def snapshot_path(self) -> Path:
        """The file that `ligerprof explain` reads, written at the end of the recording."""
        return self._run.snapshot

    @property
    def is_open(self) -> bool:
        """Whether it is recording."""
        return self._phases is not None

    def open(self) -> "Recorder":
        """Start recording."""
        self._history.start(max_entries=self._max_entries, stacks=self._stacks)
        self._phases = LoopPhases(self._history.stamp)
        self._phases.open()
        self._history.observe_out_of_memory(self._save_out_of_memory)
        return self

    def close(self, failure: BaseException | None = None) -> None:
        """Stop recording and write the snapshot.

        Args:
            failure: the exception that ended the loop, or None. With one, a snapshot written when memory ran out
                is kept, and a snapshot that cannot be written is a warning.

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
        """Attribute allocations to the modules of `model`; without a call, it is the first module that runs."""
        self._open_phases().attach(model)

    def step(self) -> None:
        """End a training step; not needed if a torch optimizer's `step` does."""
        self._open_phases().end_step()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Set the phase inside a context: `forward`, `backward`, `optimizer`, `build` or `outside`.

        Raises:
            LigerprofError: the phase is unknown.
        """
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

    def _make_room(self) -> None:
        try:
            self._run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(
                f"{self._run.path}: cannot create the directory ({error.strerror}). Record into another."
            ) from None
        require_absent([self._run.snapshot], force=self._force, flag="force=True")

    def _write(self) -> None:
        # this recorder wrote the snapshot of an earlier out-of-memory error itself
        self._run.write_snapshot(self._history.snapshot(), force=self._force or self._ran_out)

    def _save_out_of_memory(self) -> None:
        """Write the snapshot while all memory is still held; torch cannot remove observers, so later calls return."""
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

    Forward, backward and optimizer steps are found by hooks. If memory runs out, the snapshot is written before
    the exception is raised.

    Args:
        directory: where snapshot.pickle goes; created if needed.
        model: whose modules are named; None: the first module that runs.
        stacks: `python`, or `all` with C++ frames.
        max_entries: how many events are kept; the oldest are dropped.
        force: overwrite a snapshot that exists.

    Raises:
        MissingDependencyError: there is no CUDA device.
        OutputError: the directory already holds a snapshot, or it cannot be written.
        RunDirectoryError: the directory cannot be created.
    """
    recorder = Recorder(directory, history=CudaHistory(), stacks=stacks, max_entries=max_entries, force=force)
    with running(recorder, model):
        yield recorder


@contextmanager
def running(recorder: Recorder, model: nn.Module | None = None) -> Iterator[Recorder]:
    """Record while the block runs, whatever ends it."""
    recorder.open()
    try:
        if model is not None:
            recorder.attach(model)
        yield recorder
    except BaseException as failure:
        recorder.close(failure)
        raise
    recorder.close()
