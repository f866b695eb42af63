"""Record the memory of a user's own training loop: `ligerprof.record(directory)`."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ligerprof.errors import LigerprofError, MissingDependencyError, OutputError, RunDirectoryError
from ligerprof.files import require_absent
from ligerprof.roles import Phase, Role
from ligerprof.runs.directory import RunDirectory
from ligerprof.runs.recording.live import tensors_by_role
from ligerprof.runs.recording.parts import Bridge, Parts
from ligerprof.runs.recording.phases import LoopModels, LoopPhases, tensors_of
from ligerprof.runs.recording.saved import SavedTensors, locate_on_cuda, unix_time_us
from ligerprof.runs.recording.settings import DISK_BYTES
from ligerprof.runs.recording.summary import LatePeak
from ligerprof.snapshots.collector import collector_paused
from ligerprof.snapshots.stamp import Stamp, with_saved_tensors

Stacks = Literal["python", "all"]
MAX_ENTRIES = 1_000_000


class Failure(NamedTuple):
    """An allocation that failed; `free_bytes` are the driver's."""

    requested_bytes: int
    allocated_bytes: int
    device: int = 0
    free_bytes: int = 0

    def to_event(self, stamp: str) -> dict[str, Any]:
        """The event that the allocator's history has of it, and the device."""
        sizes = {"size": self.requested_bytes, "device_free": self.free_bytes}
        return {"action": "oom", **sizes, "stream": 0, "user_metadata": stamp, "frames": [], "device": self.device}


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
        self._record_history = cuda.memory._record_memory_history
        bindings: Any = torch._C
        # attaches a text to the events that follow; a step calls it thousands of times, so directly where possible
        self.stamp: Callable[[str], None] = getattr(
            bindings, "_cuda_setMemoryMetadata", self._memory._set_memory_metadata
        )
        # of the last time that memory ran out
        self.last_failure: Failure | None = None

    def start(self, *, max_entries: int, stacks: Stacks, frames: bool = True, clear: bool = False) -> None:
        """Start recording events, or continue with other settings; `clear`: without the events so far."""
        # context="all" would break non-reentrant checkpointing around Python autograd Functions
        context = "alloc" if frames else None
        self._record_history(max_entries=max_entries, stacks=stacks, context=context, clear_history=clear)

    def stop(self) -> None:
        self._memory._set_memory_metadata("")
        self._record_history(enabled=None)

    def keep_on(self, say: Callable[[], None]) -> None:
        """Ignore the program's own calls that switch the history on or off; `say` is called at each of them."""

        def ignored(*_arguments: Any, **_named: Any) -> None:
            say()

        self._memory._record_memory_history = ignored

    def release(self) -> None:
        """Let the program switch the history again."""
        self._memory._record_memory_history = self._record_history

    def snapshot(self) -> dict[str, Any]:
        """The recording, as torch.cuda.memory._snapshot() returns it."""
        taken: dict[str, Any] = self._memory._snapshot()
        return taken

    def locate(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Device and address of a tensor's storage; None if it is not in CUDA memory."""
        return locate_on_cuda(tensor)

    def now_us(self) -> int:
        return unix_time_us()

    def peak_bytes(self, counter: str = "allocated_bytes") -> int:
        """What torch.cuda.max_memory_allocated() reports, or max_memory_reserved() for `reserved_bytes`."""
        # these functions flatten and sort all counters first
        counters: Any = torch.cuda.memory_stats_as_nested_dict()
        return int(counters[counter]["all"]["peak"]) if counters else 0

    def events(self) -> int:
        """About how many events the allocator has had, the recorded ones and others."""
        counters: Any = torch.cuda.memory_stats_as_nested_dict()
        allocations, segments = counters["allocation"]["all"], counters["segment"]["all"]
        # an allocation is an event, a free two: one when it is requested, one when it is complete
        return int(allocations["allocated"] + 2 * allocations["freed"] + segments["allocated"] + segments["freed"])

    def observe_out_of_memory(self, observer: Callable[[], None]) -> None:
        """Call `observer` when an allocation fails, before the exception is raised."""
        bindings: Any = torch._C

        def observe(device: int, requested_bytes: int, allocated_bytes: int, free_bytes: int) -> None:
            self.last_failure = Failure(requested_bytes, allocated_bytes, device, free_bytes)
            observer()

        bindings._cuda_attach_out_of_memory_observer(observe)


# many events, mostly below the peak: what they reach there is not known. Scoring has as many as a forward pass
_LONG_PHASES = (Phase.GENERATION, Phase.EVALUATION)


class Recorder:
    """Records from `open` to `close`, and writes snapshot.pickle on `close`, or earlier if memory runs out.

    Args:
        disk_bytes: the most bytes of the parts of a long recording, as of `Parts`; None: only the newest `max_entries`
            events are kept.
        first_step: the step from which on events have stacks and modules. The build and the first step have stacks,
            since weights and optimizer states stay. Between them and the step before `first_step`, the history is
            off, which costs nothing, and what these steps leave is found at their end. The events of the step
            before `first_step` have a phase, which shows what one step leaves to the next.
        on_step: callback that receives the number of each step when it begins.
        on_out_of_memory: callback for each allocation that fails, until the process ends. It receives the running
            step, 0 after the recording.

    The other arguments and the exceptions are those of `record`.
    """

    def __init__(  # noqa: PLR0913 - the options of `record`, and six
        self,
        directory: str | Path,
        *,
        history: CudaHistory,
        stacks: Stacks = "all",
        max_entries: int = MAX_ENTRIES,
        force: bool = False,
        disk_bytes: int | None = None,
        keeps_all: bool = False,
        first_step: int = 1,
        on_step: Callable[[int], None] | None = None,
        on_out_of_memory: Callable[[int], None] | None = None,
    ) -> None:
        self._run = RunDirectory(path=Path(directory))
        self._history, self._stacks, self._max_entries, self._force = history, stacks, max_entries, force
        self._first_step, self._on_step = first_step, on_step
        self._on_out_of_memory = on_out_of_memory
        self._phases: LoopPhases | None = None
        # [modules, bytes] by name, of the modules that trained
        self.weights: dict[str, list[int]] = {}
        self.models = LoopModels()
        self._saved = SavedTensors(locate=history.locate, clock=history.now_us)
        self._ran_out = False
        self._in_parts = disk_bytes is not None
        self._parts = Parts(
            self._run.path, most_entries=max_entries, disk_bytes=disk_bytes or DISK_BYTES, keeps_all=keeps_all
        )
        self._keeps_all = keeps_all
        # whether the running part has more than evaluations
        self._trains = True
        self._inference = Phase.EVALUATION
        # whether the history has stacks, and whether it is off
        self._frames, self._is_off, self._running_stacks = True, False, stacks
        # the first and the last step of the recording that was written, if it lacks others
        self.kept_steps: tuple[int, int] | None = None
        # its peak, if the disk was too full for the events
        self.lost_peak: LatePeak | None = None
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
    def begun(self) -> int:
        """The number of the last step that began; 0 after the end."""
        return 0 if self._phases is None else self._phases.step

    @property
    def is_open(self) -> bool:
        return self._phases is not None

    def known_tensors(self) -> Iterable[tuple[torch.Tensor, Role]]:
        """Weights, gradients and states of the optimizers that have stepped."""
        return () if self._phases is None else tensors_by_role(self._phases.optimizers)

    def open(self) -> "Recorder":
        self._history.start(max_entries=self._max_entries, stacks=self._stacks)
        # without C++ frames, only hooks show which node runs
        names_all_nodes = self._stacks == "python"
        self._phases = LoopPhases(
            self._history.stamp,
            self._saved,
            self._begin_step,
            self._begin_phase if self._in_parts else None,
            names_all_nodes=names_all_nodes,
        )
        self.weights, self.models = self._phases.weights, self._phases.models
        self._phases.open(modules=self._first_step == 1)
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
        phases, self._phases = self._phases, None
        if phases is None:
            return
        phases.close()
        try:
            if not (self._ran_out and isinstance(failure, torch.OutOfMemoryError)):
                self._write(phases)
        except LigerprofError as error:
            if failure is None:
                raise
            warnings.warn(f"the recording is lost: {error}", stacklevel=2)
        finally:
            self._history.stop()
            # torch keeps the observer of failures, and so this object
            self._parts.remove()
            self._saved.rows.clear()

    def _begin_step(self, step: int) -> None:
        if self._in_parts:
            self._end_part(begins_step=True)
        if self._phases is not None and step in (2, self._first_step - 1, self._first_step) and step > 1:
            try:
                self._switch_history(self._phases, step)
            except RuntimeError as error:
                # training goes on
                warnings.warn(f"the recording misses step {step}: {error}", stacklevel=2)
        if self._on_step is not None:
            self._on_step(step)

    def _switch_history(self, phases: LoopPhases, step: int) -> None:
        if step == self._first_step:
            self._frames = True
            self._start_history()
            phases.name_modules()
        elif step == self._first_step - 1:
            if self._is_off:
                self._parts.cross(self._end_of_gap(phases, step - 1), peak_bytes=self._history.peak_bytes())
            self._frames = self._is_off = False
            self._start_history()
            phases.stamp(enabled=True)
        elif step == 2 and step < self._first_step:
            self._is_off = True
            self._take_part(step - 1)
            self._history.stop()
            phases.stamp(enabled=False)

    def _start_history(self, *, clear: bool = False) -> None:
        stacks = self._running_stacks
        self._history.start(max_entries=self._max_entries, stacks=stacks, frames=self._frames, clear=clear)

    def _begin_phase(self, phase: Phase) -> None:
        if self._is_off:
            return
        self._end_part()
        if phase in _LONG_PHASES:
            self._inference = phase
        elif phase is not Phase.OUTSIDE:
            self._trains = True
        # stacks of C++ take most of the time of a long generation; here, nothing but operators' names is lost
        only_python = phase in _LONG_PHASES and self._frames and not self._parts.is_empty
        stacks: Stacks = "python" if only_python else self._stacks
        if stacks != self._running_stacks:
            self._running_stacks = stacks
            self._start_history()

    def _end_part(self, *, begins_step: bool = False) -> None:
        """Between two phases, take the events out of torch's buffer before it overflows."""
        phases = self._phases
        if phases is None or self._is_off or not self._parts.is_due(self._history.events, begins_step=begins_step):
            return
        try:
            if self._keeps_all or self._trains or self._history.peak_bytes() > self._parts.peak_bytes:
                self._take_part(phases.step, begins_step=begins_step)
            else:
                self._skip_part(phases.step, begins_step=begins_step)
        except (OSError, RuntimeError) as error:
            warnings.warn(f"the recording misses events of step {phases.step}: {error}", stacklevel=2)
        self._trains = False
        self._parts.restart(self._history.events())

    def _skip_part(self, step: int, *, begins_step: bool) -> None:
        """Leave out the events of an evaluation below the peak: to make objects of them takes most of the time."""
        with collector_paused():
            self._start_history(clear=True)
            stamp = Stamp(step=step, phase=self._inference).to_text()
            event = {"time_us": self._history.now_us(), "user_metadata": stamp}
            self._parts.skip(self._history.snapshot(), step=step, event=event, begins_step=begins_step)

    def _take_part(self, step: int, *, begins_step: bool = False) -> None:
        # it makes millions of objects
        with collector_paused():
            taken = self._history.snapshot()
            # at the end, and before steps without a history, it is stopped instead
            if self._phases is not None and not self._is_off:
                self._start_history(clear=True)
            self._parts.add(taken, step=step, peak_bytes=self._history.peak_bytes(), begins_step=begins_step)

    def _end_of_gap(self, phases: LoopPhases, step: int) -> Bridge:
        known = {}
        for tensor, phase in tensors_of(phases.optimizers):
            try:
                place = self._history.locate(tensor)
            except (RuntimeError, NotImplementedError):
                # sharded and sparse tensors have no storage of their own
                continue
            if place is not None:
                known[place] = phase
        return Bridge(self._history.snapshot(), known, step, self._history.now_us())

    def abandon(self) -> None:
        """Remove the hooks without writing anything or touching CUDA, as a forked child has to."""
        if self._phases is not None:
            self._phases.close()
            self._phases = None
            self._saved.rows.clear()

    def attach(self, model: nn.Module) -> None:
        """End the build, and name the modules of `model` as it does; otherwise, each outermost module names its own."""
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

    def _write(self, phases: LoopPhases, failure: Mapping[str, Any] | None = None) -> None:
        try:
            snapshot = self._whole(phases, failure)
        except OSError as error:
            raise OutputError(f"{self._run.path}: the parts of the recording are lost ({error}).") from None
        # if memory ran out before, this recorder wrote the existing snapshot
        left_out = None if self.kept_steps is None else self._parts.phase_peaks
        snapshot = with_saved_tensors(snapshot, self._saved.rows, left_out)
        self._run.write_snapshot(snapshot, force=self._force or self._ran_out)

    def _whole(self, phases: LoopPhases, failure: Mapping[str, Any] | None) -> Mapping[str, Any]:
        if self._is_off:
            # it ends in a step without a history
            bridge = self._end_of_gap(phases, phases.step)._replace(failure=failure)
            self._parts.cross(bridge, peak_bytes=self._history.peak_bytes())
        elif not self._parts.is_empty:
            self._take_part(phases.step)
        if self._parts.is_empty:
            return self._history.snapshot()
        snapshot, self.kept_steps = self._parts.joined(at_end=failure is not None)
        self.lost_peak = self._parts.lost_peak
        return snapshot

    def _save_out_of_memory(self) -> None:
        """Write the snapshot while the memory is in use; torch cannot remove observers, so they return later."""
        if self._on_out_of_memory is not None:
            self._on_out_of_memory(self.begun)
        if self._phases is None or self._ran_out:
            return
        try:
            failed = self._history.last_failure
            self._write(self._phases, None if failed is None else failed.to_event(self._phases.text))
            self._ran_out = True
        except LigerprofError as error:
            warnings.warn(f"out of memory, and the snapshot cannot be written: {error}", stacklevel=2)


@contextmanager
def record(
    directory: str | Path,
    *,
    model: nn.Module | None = None,
    stacks: Stacks = "all",
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
        model: the model whose modules are named, and whose build ends here; None: the models that run are named.
        stacks: `all`, or `python` without C++ frames: hooks then name each autograd node, which costs more.
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
