"""Start the commands of cells: measured ones as new processes, simulated ones as forks of a warm process.

Importing torch and transformers takes longer than a small simulated step. On Linux, a fork server imports them once
per sweep and forks each simulated cell. On other systems fork is missing, or unsafe after these imports, and every cell
is a new process. So is every measured cell, because CUDA cannot be used in a forked process.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ligerprof.recipe.categories import Device
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.sweep.guard import GRACE_SECONDS, POLL_SECONDS

_STOP_SECONDS = 2 * GRACE_SECONDS
_END_SECONDS = 0.5
_HAS_FORK_SERVER = sys.platform == "linux"


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A cell's command.

    Attributes:
        words: the words after `python`.
        output: file for its stdout.
        log: file for its stderr.
    """

    words: tuple[str, ...]
    recipe: TrainingRecipe
    output: Path
    log: Path


class RunningCell(Protocol):
    """A started command."""

    def poll(self) -> int | None:
        """The exit code, negative or 128 + N if signal N ended it; None while it runs."""

    def stop(self) -> None:
        """End it with all processes that it started."""


class CellStarter:
    """Starts cells; a context manager that ends the fork server.

    Args:
        folder: the sweep's folder, shown in the fork server's command line.
        prepares: name of the module whose function `prepare` imports what a simulated recipe needs.
    """

    def __init__(self, folder: Path, prepares: str = "ligerprof.runs.sweep.fork_server") -> None:
        # forks have the command line of the server: the folder shows to which sweep they belong
        self._arguments = (str(folder), prepares)
        self._server: _ForkServer | None = None

    def __enter__(self) -> "CellStarter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_server()

    def start(self, command: Command) -> RunningCell:
        """Start a command.

        Raises:
            OSError: its files cannot be written, or the system cannot start another process.
        """
        if command.recipe.device is Device.SIMULATED and _HAS_FORK_SERVER:
            if self._server is None or not self._server.is_alive():
                self._end_server()
                self._server = _ForkServer(self._arguments)
            return self._server.start(command)
        return _NewProcess(command)

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.end()
            self._server = None


class _NewProcess:
    """A command in a new process, which a guard ends with this one."""

    def __init__(self, command: Command) -> None:
        python = [sys.executable, *command.words]
        with command.output.open("wb") as output, command.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ligerprof.runs.sweep.guard", *python],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=log,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None:
            self._close()
        return code

    def stop(self) -> None:
        self._close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self._process.kill()
        self._process.wait()

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()


class _ForkServer:
    """The client of a fork server, which ends when this process does."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ligerprof.runs.sweep.fork_server", *arguments],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, command: Command) -> "_Fork":
        stdin, our_stdin = os.pipe()
        our_answer, answer = os.pipe()
        try:
            with (
                command.output.open("wb") as output,
                command.log.open("wb") as log,
                os.fdopen(os.memfd_create("request"), "w+", encoding="utf-8") as request,
            ):
                json.dump({"words": command.words, "recipe": command.recipe.to_json()}, request)
                # the server reads from the position that it shares with this process
                request.seek(0)
                files = [request.fileno(), stdin, output.fileno(), log.fileno(), answer]
                # a server that has just ended answers with its exit code
                with suppress(BrokenPipeError, ConnectionResetError):
                    socket.send_fds(self._socket, [b"?"], files)
        finally:
            os.close(stdin)
            os.close(answer)
        return _Fork(self._process, our_stdin, our_answer)

    def end(self) -> None:
        """End the server; its cells have ended, or their guards end them when their stdin is closed."""
        self._socket.close()
        # it is importing if it does not end by itself
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._process.kill()
        self._process.wait()


class _Fork:
    """A command in a fork of the server, which answers with the guard's process id and then its exit code."""

    def __init__(self, server: "subprocess.Popen[bytes]", stdin: int, answer: int) -> None:
        self._server, self._stdin, self._answer = server, os.fdopen(stdin, "wb", 0), os.fdopen(answer, "rb", 0)
        os.set_blocking(answer, False)
        self._said = b""
        self._code: int | None = None

    def poll(self) -> int | None:
        while self._code is None and (said := self._answer.read(64)) is not None:
            self._said += said
            if not said:
                self._code = self._final_code()
                self._stdin.close()
                self._answer.close()
        return self._code

    def stop(self) -> None:
        self._stdin.close()
        give_up = time.monotonic() + _STOP_SECONDS
        # a server that is still importing does not start a cell whose stdin is closed
        while self.poll() is None and self._said:
            if time.monotonic() > give_up:
                with suppress(ProcessLookupError):
                    os.killpg(int(self._said.split()[0]), signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        if self._code is None:
            self._code = -signal.SIGTERM
            self._answer.close()

    def _final_code(self) -> int:
        answers = self._said.split()
        if len(answers) > 1:
            return int(answers[-1])
        if answers or self._stdin.closed:
            # the guard ended itself with its group, or was killed
            return -signal.SIGKILL
        return self._server.wait()
