"""Record one process of a command from its first use of CUDA to its end, however it ends."""

import atexit
import os
import signal
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, cuda
from torch.optim.optimizer import register_optimizer_step_post_hook

from ligerprof.analyzers.explain.ranks import ModuleWeights
from ligerprof.errors import LigerprofError
from ligerprof.roles import Role
from ligerprof.runs.directory import RunDirectory
from ligerprof.runs.recording.device import DeviceWatch
from ligerprof.runs.recording.live import LiveFile
from ligerprof.runs.recording.patches import Patches
from ligerprof.runs.recording.phases import LoopModels
from ligerprof.runs.recording.record import CudaHistory, Recorder
from ligerprof.runs.recording.saved import unix_time_us
from ligerprof.runs.recording.settings import Settings, say
from ligerprof.runs.recording.summary import (
    PREFIX,
    RECORDING,
    LateFailure,
    LatePeak,
    RecordingState,
    RecordingSummary,
    current_rank,
)
from ligerprof.serialization import to_json

if TYPE_CHECKING:
    from ligerprof.simulated_gpu.machine import Machine

# reading torch's counter takes 12 to 60 us
_SECONDS_BETWEEN_READS = 0.01
_SECONDS_ON_TERMINAL, _SECONDS_ELSEWHERE = 3, 60
_OWN_HISTORY = "the program switches the allocator's history itself; its calls had no effect"


class Progress:
    """Says which step begins; the time that is left is known if the last step is.

    Args:
        last: the step after which the command ends, None if that is up to the command.
    """

    def __init__(self, last: int | None) -> None:
        self._last = last
        self._started = self._said = time.monotonic()
        # when the first step began
        self._began: float | None = None
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._pause = _SECONDS_ON_TERMINAL if is_terminal else _SECONDS_ELSEWHERE

    def begin(self, step: int) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if now - self._said < self._pause or (self._last is not None and step > self._last):
            return
        self._said = now
        of, left = "", ""
        if self._last is not None:
            of = f" of {self._last}"
            if step > 1:
                left = f", about {(now - self._began) / (step - 1) * (self._last - step + 1):.0f} s left"
        say(f"simulating step {step}{of}, {now - self._started:.0f} s so far{left}")


class ProcessRecording:
    """Records this process into its own folder of `settings.output`.

    The recording ends with the process (normally, by an exception, os._exit or SIGTERM) or after the chosen steps.
    Afterwards, only optimizer steps are counted, and torch's peak is read
    once per step. Children that this process forks are not recorded by it.
    """

    def __init__(self, settings: Settings, history: CudaHistory | None = None) -> None:
        assert settings.output is not None
        self._pid = os.getpid()
        self._run = RunDirectory(path=settings.output / f"{PREFIX}{self._pid}")
        self._history = history or CudaHistory()
        self._steps = settings.steps
        self._summary = RecordingSummary(pid=self._pid, started_us=unix_time_us(), argv=tuple(sys.orig_argv))
        self._recorder: Recorder | None = None
        self._weights: dict[str, list[int]] = {}
        self._models = LoopModels()
        self._machine: Machine | None = None
        self._progress: Progress | None = None
        if settings.simulated is not None:
            self._progress = Progress(settings.steps.last)
            from ligerprof.simulated_gpu.machine import installed

            self._machine = installed()
        self._device = DeviceWatch() if self._machine is None and cuda.is_available() else None
        self._patches = Patches()
        self._live = LiveFile(self._run.path, self._tensors, self._device) if cuda.is_available() else None
        # the step that runs, or the next; and the last one that began
        self._step = self._begun = 0
        self._disk_bytes = settings.disk_bytes
        self._peak_before_bytes = 0
        # when torch's counter was read, and the last step that had ended then
        self._read_at, self._read_step = 0.0, 0
        self._counts: Any = None
        self._counted: Callable[[], object] = lambda: None
        # of each optimizer in the running step; later, how many of one make a step, and how many of it there were
        self._updates: Counter[int] = Counter()
        self._updates_per_step = self._updates_of_counted = 0

    def start(self) -> None:
        """Start recording, and arrange the end; raises RunDirectoryError if the folder cannot be created."""
        recorder = Recorder(
            self._run.path,
            history=self._history,
            disk_bytes=self._disk_bytes,
            keeps_all=self._steps.last is not None,
            first_step=self._steps.first,
            on_step=_quietly(self._begin_step),
            on_out_of_memory=_quietly(self._note_out_of_memory),
        )
        self._write_summary()
        self._recorder = recorder.open()
        self._weights, self._models = recorder.weights, recorder.models
        if self._steps.first == 1:
            self._counts = register_optimizer_step_post_hook(self._note_update)
        self._history.keep_on(lambda: self._note(_OWN_HISTORY))
        if self._device is not None:
            self._device.observe(self._patches, _quietly(self._note_device))
        atexit.register(self.finish)
        os.register_at_fork(after_in_child=self._leave)
        self._wrap_exit()
        self._handle_termination()

    def finish(self) -> None:
        """Write the snapshot and the summary; for a process that recorded before, only the summary."""
        if self._pid != os.getpid():
            return
        if self._recorder is not None:
            self._step = self._begun = max(self._begun, self._recorder.begun)
        _quietly(self._note_live)(self._step, is_last=True)
        if self._recorder is not None and 2 <= self._step < self._steps.first:
            _quietly(self._note_peak)(self._step, is_last=True)
        self._stop()
        self._patches.undo()
        if self._counts is not None:
            self._counts.remove()
            self._counts = None
            if self._updates_per_step:
                _quietly(self._note_peak)(self._begun, is_last=True)
        self._write_summary()

    def _stop(self) -> None:
        """End the recording; the program must not notice a failure."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        with suppress(Exception):
            self._summary = replace(
                self._summary,
                counter_peak_bytes=self._history.peak_bytes(),
                counter_reserved_bytes=self._history.peak_bytes("reserved_bytes"),
            )
        state = RecordingState.LOST
        try:
            recorder.close(getattr(sys, "last_value", None))
            state = RecordingState.WRITTEN
            if recorder.kept_steps is not None:
                self._note_length(*recorder.kept_steps)
            if recorder.lost_peak is not None:
                self._summary = replace(self._summary, late_peak=recorder.lost_peak)
        except LigerprofError as error:
            say(f"the recording is lost: {error}")
        except Exception as error:
            say(f"the recording is lost: {type(error).__name__}: {error}")
        finally:
            self._history.release()
        self._summary = replace(self._summary, state=state)

    def _note_length(self, first: int, last: int) -> None:
        self._summary = replace(self._summary, last_recorded=last)
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        chosen = self._steps.last is not None
        remedy = "a larger --disk keeps more" if chosen else "--steps FIRST:LAST keeps those steps whole"
        self._note(
            f"the recording is long: it has the events around the peak, of {steps}, and of earlier ones the blocks that"
            f" still live then; {remedy}"
        )

    def _begin_step(self, step: int) -> None:
        if self._progress is not None:
            self._progress.begin(step)
        if self._recorder is not None:
            self._record_step(step)
        self._note_live(step)

    def _record_step(self, step: int) -> None:
        """Count a step of the recording; end the recording in front of a step that is not to be recorded."""
        first = self._steps.first
        if 2 < step < first:
            # the steps up to here may have run without a history
            self._note_peak(step - 1, is_last=step == first - 1)
        self._step = self._begun = step
        if step == 2 <= first:
            self._peak_before_bytes, self._read_step = self._history.peak_bytes(), 1
        if step < first:
            return
        updates = dict(self._updates)
        self._updates.clear()
        if self._counts is None:
            self._counts = register_optimizer_step_post_hook(self._note_update)
        if self._steps.last is None or step <= self._steps.last:
            return
        if self._machine is not None:
            self._step = self._begun = step - 1
        self._end(step - 1)
        if self._machine is not None:
            # the rest would take time and show nothing
            say(f"simulated up to step {step - 1}")
            raise SystemExit(0)
        # DeepSpeed updates groups of weights one after another
        self._updates_per_step = max(updates.values(), default=1)
        self._counts = register_optimizer_step_post_hook(self._count)

    def _end(self, step: int) -> None:
        self._summary = replace(self._summary, last_recorded=step)
        self._stop()
        self._write_summary()
        self._peak_before_bytes, self._read_step = self._summary.counter_peak_bytes, step
        self._counts.remove()

    def _note_update(self, optimizer: object, _arguments: Any, _named: Any) -> None:
        self._updates[id(optimizer)] += 1

    def _count(self, optimizer: object, _arguments: Any, _named: Any) -> None:
        """Note the peak of a step after the recording; of several optimizers, the first counts."""
        if self._counted() is None:
            self._counted = weakref.ref(optimizer)
        self._begun = self._step
        # a call of Python less in most of the short steps
        if time.monotonic() - self._read_at >= _SECONDS_BETWEEN_READS:
            _quietly(self._note_peak)(self._step, is_over=False)
        if optimizer is self._counted():
            self._updates_of_counted += 1
            self._step += self._updates_of_counted % self._updates_per_step == 0

    def _note_peak(self, step: int, *, is_over: bool = True, is_last: bool = False) -> None:
        """Note the peak up to a step without events, if it is the highest; of short steps, several are read at once.

        Args:
            is_over: whether the step has ended; after an update, an evaluation may follow.
            is_last: whether the steps without events end.
        """
        now = time.monotonic()
        if now - self._read_at < _SECONDS_BETWEEN_READS and not is_last:
            return
        self._note_live(step)
        peak_bytes = self._history.peak_bytes()
        known_bytes = max(self._peak_before_bytes, getattr(self._summary.late_peak, "peak_bytes", 0))
        if peak_bytes > known_bytes:
            late_peak = LatePeak(peak_bytes=peak_bytes, step=step, first_step=min(self._read_step + 1, step))
            self._summary = replace(self._summary, late_peak=late_peak)
        self._read_at, self._read_step = now, step if is_over else step - 1

    def _note_live(self, step: int, *, is_last: bool = False) -> None:
        if self._live is not None:
            self._live.note(step, is_last=is_last, is_recorded=self._recorder is not None)

    def _note_device(self, event: str, freed_bytes: int | None = None) -> None:
        """Note the GPU as an engine goes to sleep or wakes, or where memory runs out."""
        if self._device is not None and self._live is not None:
            is_recorded = self._recorder is not None
            self._live.note_device(self._begun, event, is_recorded=is_recorded, freed_bytes=freed_bytes)

    def _tensors(self) -> Iterable[tuple[Tensor, Role]]:
        return () if self._recorder is None else self._recorder.known_tensors()

    def _note_out_of_memory(self, step: int) -> None:
        if self._pid != os.getpid():
            return
        failure = self._history.last_failure
        if self._recorder is None and failure is not None:
            late = LateFailure(
                requested_bytes=failure.requested_bytes, allocated_bytes=failure.allocated_bytes, step=self._step
            )
            self._summary = replace(self._summary, late_failure=late)
        self._begun = max(self._begun, step)
        _quietly(self._note_device)("out_of_memory")
        self._summary = replace(self._summary, out_of_memory=True)
        self._write_summary()

    def _note(self, text: str) -> None:
        if text not in self._summary.notes:
            self._summary = replace(self._summary, notes=(*self._summary.notes, text))

    def _write_summary(self) -> None:
        machine = self._machine
        simulated = None if machine is None else machine.summary()
        self._summary = replace(self._summary, rank=current_rank(), steps=self._begun, simulated=simulated)
        if machine is None:
            highest_bytes, pinned_bytes = _main_memory()
            self._summary = replace(self._summary, main_memory_bytes=highest_bytes, pinned_bytes=pinned_bytes)
        weights = {name: ModuleWeights(*held) for name, held in self._weights.items()}
        self._summary = replace(self._summary, weights=weights, models=tuple(self._models.described()))
        try:
            self._run.write_json(RECORDING, to_json(self._summary))
        except LigerprofError as error:
            say(str(error))

    def _leave(self) -> None:
        """In a forked child: take the hooks out, without touching CUDA."""
        self._patches.undo()
        if self._recorder is not None:
            self._recorder.abandon()
            self._recorder = None
            self._history.release()
        if self._counts is not None:
            self._counts.remove()
        if getattr(signal.getsignal(signal.SIGTERM), "__self__", None) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _wrap_exit(self) -> None:
        original = os._exit

        def leave(status: int) -> Any:
            self.finish()
            original(status)

        exits: Any = os
        exits._exit = leave

    def _handle_termination(self) -> None:
        """Finish at SIGTERM if the program does not handle it; launchers send it to the ranks that still run."""
        previous = signal.getsignal(signal.SIGTERM)
        if previous is not signal.SIG_DFL:
            return
        # only the main thread may set handlers
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, number: int, _frame: Any) -> None:
        self.finish()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _quietly(function: Callable[..., None]) -> Callable[..., None]:
    """A callback whose failure the program does not notice."""

    def call(*arguments: Any, **named: Any) -> None:
        try:
            function(*arguments, **named)
        except Exception as error:
            say(f"{type(error).__name__}: {error}")

    return call


def _main_memory() -> tuple[int, int]:
    """The most main memory that this process took, and that torch page-locked of it."""
    highest_bytes = pinned_bytes = 0
    with suppress(Exception):
        pinned_bytes = int(cuda.host_memory_stats().get("allocated_bytes.peak", 0))
    # Linux alone has it; `ru_maxrss` starts with that of the process that started this one
    with suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        highest_bytes = int(status.partition("VmHWM:")[2].split()[0]) << 10
    return highest_bytes, pinned_bytes
