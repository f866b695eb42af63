"""Begin to record when this process first uses a CUDA device; every Python process of a recorded command imports this.

It must start fast and never fail: it needs the standard library alone until torch has been imported by the program.
"""

import gc
import os
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

from ligerprof.errors import LigerprofError
from ligerprof.runs.recording.branches import become_trunk, is_trunk
from ligerprof.runs.recording.imports import after_import, after_import_or_now
from ligerprof.runs.recording.settings import IMPORTED, Mode, Settings, SimulatedGpu, say

_OBJECTS_BETWEEN_COLLECTIONS = 100_000

_opened = False


def open_door() -> None:
    """Arrange the recording that the environment asks for; later calls do nothing."""
    global _opened  # noqa: PLW0603 - one per process, whichever of two doors opens first
    if _opened:
        return
    _opened = True
    try:
        settings = Settings.from_environment()
    except LigerprofError as error:
        problem = str(error)
        # only processes that import torch, so that others keep their output
        after_import("torch", lambda _torch: say(problem))
        return
    if settings is None:
        return
    if settings.simulated is not None and settings.output is not None:
        from ligerprof.simulated_gpu.files import watch_files
        from ligerprof.simulated_gpu.network import leave_network

        watch_files(settings.output)
        leave_network()
        _collect_rarely()
        if settings.simulated.flash_attn:
            from ligerprof.simulated_gpu.flash_attn import stand_in

            stand_in()
        become_trunk(_is_unused, _branch)
    if "torch" in sys.modules:
        _await_cuda(sys.modules["torch"], settings)
    else:
        after_import("torch", lambda torch: _await_cuda(torch, settings))


def _await_cuda(torch: ModuleType, settings: Settings) -> None:
    """Start when CUDA is initialized: before the first allocation, and never in launchers and data workers."""
    # those of a branch are its own
    settings = Settings.from_environment() or settings
    if settings.simulated is not None:
        _simulate(settings.simulated)
    cuda: Any = torch.cuda
    if settings.mode is Mode.RUN and settings.output is not None:
        with suppress(OSError):
            (settings.output / IMPORTED).touch()

    def start() -> None:
        if is_trunk():
            # its branches record, each for itself; a program that allocates before it reads its arguments has none
            machine = _machine()
            if machine is not None:
                machine.device.observer = lambda *_: os._exit(0)
            return
        try:
            _start(Settings.from_environment() or settings)
        except Exception as error:
            # a program must run as it would without a recording
            say(f"nothing is recorded in this process: {type(error).__name__}: {error}")

    cuda._lazy_call(start)


def _machine() -> Any:
    if "torch" not in sys.modules:
        return None
    from ligerprof.simulated_gpu.machine import installed

    return installed()


def _is_unused() -> bool:
    machine = _machine()
    return machine is None or not machine.device.allocations


def _branch() -> None:
    """Go on with the settings of the environment."""
    from ligerprof.simulated_gpu.files import watched

    settings, files = Settings.from_environment(), watched()
    if settings is None or settings.output is None or settings.simulated is None or files is None:
        raise LigerprofError("a branch has the settings of a simulated run.")
    files.move(settings.output)
    machine = _machine()
    if machine is not None:
        machine.branch(settings.simulated.limit_bytes)


def _collect_rarely() -> None:
    """Python's collector takes a fifth of the imports of a trainer, which leave nothing to collect."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *before[1:])

    def collect(torch: Any) -> None:
        # from the first tensor on the GPU, cycles end as they do on a GPU
        torch.cuda._lazy_call(lambda: gc.set_threshold(*before))

    after_import_or_now("torch", collect)


def _simulate(simulated: SimulatedGpu) -> None:
    """Give this process a GPU; without one, the program would do something else."""
    from ligerprof.gpus import find_gpu
    from ligerprof.simulated_gpu.machine import install

    try:
        machine = install(
            find_gpu(simulated.gpu), limit_bytes=simulated.limit_bytes, eager=simulated.eager, routing=simulated.routing
        )
        if simulated.times:
            from ligerprof.runs.simulated.work import ProgramCounter

            ProgramCounter().install(machine)
    except LigerprofError as error:
        say(str(error))
        raise SystemExit(1) from None


def _start(settings: Settings) -> None:
    if settings.mode is Mode.RUN:
        from ligerprof.runs.recording.process import ProcessRecording

        ProcessRecording(settings).start()
    else:
        from ligerprof.runs.recording.out_of_memory import OutOfMemoryWatch

        OutOfMemoryWatch(settings).start()
