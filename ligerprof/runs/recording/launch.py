"""Run a command as `ligerprof run` does: its output and signals pass through, and its exit code comes back."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ligerprof.errors import MissingDependencyError
from ligerprof.recipe.commands.shell import has_launcher
from ligerprof.runs.recording import startup
from ligerprof.runs.recording.settings import Settings
from ligerprof.simulated_gpu.ranks.world import script_command

# sent to this process alone, they are passed on
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# si_code of a signal that the terminal sent to the whole foreground group, the command included
_FROM_KERNEL = 0x80
_AFTER_INTERRUPT_SECONDS = 0.7
_UNTIL_KILLED_SECONDS = 60
_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEnd:
    """How a command ended.

    Attributes:
        exit_code: as a shell reports it: 128 and the signal's number for a command that a signal ended.
        interrupted: whether Ctrl-C ended it; it may still be running.
    """

    exit_code: int
    interrupted: bool = False
    runs: bool = False


def python_command(command: Sequence[str]) -> list[str]:
    """The command as it is started: a Python file or `-m module` gets this Python in front."""
    first = command[0]
    if first == "-m" or (first.endswith(".py") and not os.access(first, os.X_OK)):
        return [sys.executable, *command]
    return list(command)


def ranked_command(command: Sequence[str], size: int | None) -> list[str]:
    """The same as ranks of a world of this size, where the command has no launcher; None: no size was given."""
    started = python_command(command)
    return started if size is None or has_launcher(command) else script_command(started, size)


def environment_of(settings: Settings, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which each Python process of a command opens the door to its recording."""
    folder = str(Path(startup.__file__).parent)
    path = os.pathsep.join(filter(None, (folder, environment.get("PYTHONPATH"))))
    return {**environment, **settings.to_environment(), "PYTHONPATH": path}


def run_command(
    command: Sequence[str], environment: Mapping[str, str], *, stdout: int | None = None, outlives: bool = True
) -> CommandEnd:
    """Run a command to its end, and pass on the signals that this process receives.

    Args:
        stdout: a file descriptor for the command's standard output; None: this process's own.
        outlives: whether the command may go on after Ctrl-C, to save its work; if not, it is killed after a while, or
            at the second Ctrl-C.

    Raises:
        MissingDependencyError: the command cannot be started.
    """
    waited = {signal.SIGCHLD, *_PASSED_ON}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    # an ignored SIGCHLD would reap the command
    child_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdout=stdout,
            # the command starts with the signals as they were; this process has no other thread
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),  # noqa: PLW1509
        )
        return _wait(process, waited, outlives=outlives)
    except OSError as error:
        raise MissingDependencyError(
            f"{command[0]}: cannot be started ({error.strerror}). Is it on the path?"
        ) from None
    finally:
        # signals that arrived after the command's end are for it
        while signal.sigtimedwait(waited, 0) is not None:
            pass
        signal.signal(signal.SIGCHLD, child_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(process: "subprocess.Popen[bytes]", waited: set[signal.Signals], *, outlives: bool) -> CommandEnd:
    interrupted_at: float | None = None
    while (status := process.poll()) is None:
        received = signal.sigtimedwait(waited, _POLL_SECONDS)
        again = interrupted_at is not None
        if received is not None and received.si_signo != signal.SIGCHLD:
            if received.si_code != _FROM_KERNEL:
                with suppress(ProcessLookupError):
                    process.send_signal(received.si_signo)
            if received.si_signo == signal.SIGINT and not again:
                interrupted_at = time.monotonic()
        if interrupted_at is None:
            continue
        seconds = time.monotonic() - interrupted_at
        if outlives and seconds > _AFTER_INTERRUPT_SECONDS:
            return CommandEnd(exit_code=128 + signal.SIGINT, interrupted=True, runs=True)
        is_second = again and received is not None and received.si_signo == signal.SIGINT
        if not outlives and (is_second or seconds > _UNTIL_KILLED_SECONDS):
            process.kill()
    if interrupted_at is not None:
        return CommandEnd(exit_code=128 + signal.SIGINT, interrupted=True)
    return CommandEnd(exit_code=status if status >= 0 else 128 - status)
