"""Serve a run with TensorBoard for as long as this process runs."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ligerprof.errors import LigerprofError, MissingDependencyError
from ligerprof.runs.directory import TENSORBOARD, TRACES

DEFAULT_PORT = 6006
_PACKAGES = ("tensorboard", "torch_tb_profiler")
_SUMMARIES = "events.out.tfevents.*"
_PROFILER_TAB = "#pytorch_profiler"
# such as `TensorBoard 2.21.0 at http://127.0.0.1:6006/ (Press CTRL+C to quit)`
_ADDRESS = re.compile(r" at http://\S*:(\d+)/")
# it imports its plugins first, which takes a while on a busy machine
_START_SECONDS = 300.0
_STOP_SECONDS = 5.0
_LONGEST_REASON = 300


class ViewerError(LigerprofError):
    """TensorBoard has nothing to show, or does not start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """A running TensorBoard.

    Attributes:
        address: its URL; of the profiler's tab if the folder holds a trace.
        process: the server.
    """

    address: str
    process: "subprocess.Popen[bytes]"

    def wait(self) -> None:
        """Wait until it ends.

        Raises:
            ViewerError: it ended with an error.
        """
        if (code := self.process.wait()) != 0:
            raise ViewerError(f"TensorBoard ended with exit code {code}. Start it again.")


@contextmanager
def serve(run: Path, *, host: str, port: int | None) -> Iterator[Serving]:
    """Run TensorBoard with the PyTorch profiler plugin; it listens when this is entered, and is ended at exit.

    Args:
        run: a run directory, a folder of them, or any folder with traces or summaries.
        port: 0: any free one; None: TensorBoard's own, or one of the next if that is taken.

    Raises:
        MissingDependencyError: TensorBoard or the plugin is not installed.
        ViewerError: nothing to show, an address that cannot be listened on, or TensorBoard does not start.
    """
    _require_packages()
    folder = log_folder(run)
    _require_address(host, port)
    with tempfile.TemporaryFile() as log, _started(folder, host, port, log) as process:
        chosen = _await_port(process, log)
        tab = _PROFILER_TAB if _holds(folder, TRACES) else ""
        yield Serving(address=f"http://{f'[{host}]' if ':' in host else host}:{chosen}/{tab}", process=process)


def log_folder(run: Path) -> Path:
    """The folder to pass to TensorBoard: a run's tensorboard/, or `run` itself.

    Raises:
        ViewerError: it holds neither a trace nor a summary.
    """
    folder = run / TENSORBOARD if (run / TENSORBOARD).is_dir() else run
    if not (_holds(folder, TRACES) or _holds(folder, _SUMMARIES)):
        raise ViewerError(f"{run}: it holds nothing for TensorBoard. Give a directory that `ligerprof step` wrote.")
    return folder


def _holds(folder: Path, pattern: str) -> bool:
    return next(folder.rglob(pattern), None) is not None


def _require_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing).replace("_", "-")
        raise MissingDependencyError(f"{names} is not installed. Try: pip install 'ligerprof[tensorboard]'.")


def _require_address(host: str, port: int | None) -> None:
    """Refuse an address that cannot be listened on; which port is used in the end, TensorBoard says."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # as TensorBoard listens: a port that a server has just left is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        place = f"{host}:{DEFAULT_PORT if port is None else port}"
        raise ViewerError(f"{place}: {error.strerror}. Try another --port or --host.") from None


@contextmanager
def _started(folder: Path, host: str, port: int | None, log: IO[bytes]) -> Iterator["subprocess.Popen[bytes]"]:
    arguments = ["--logdir", str(folder), "--host", host, *([] if port is None else ["--port", str(port)])]
    process = subprocess.Popen([sys.executable, "-m", "tensorboard.main", *arguments], stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_port(process: "subprocess.Popen[bytes]", log: IO[bytes]) -> int:
    """The port that TensorBoard listens on, once it does: it prints the address then."""
    give_up = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < give_up:
        if (found := _ADDRESS.search(_read(log))) is not None:
            return int(found.group(1))
        time.sleep(0.1)
    lines = [line.strip()[:_LONGEST_REASON] for line in _read(log).splitlines() if line.strip()]
    raise ViewerError(f"TensorBoard does not start: {lines[-1] if lines else 'it printed nothing'}")


def _read(log: IO[bytes]) -> str:
    """What was written so far; the position, which the writing process shares, stays at the end."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), size, 0).decode("utf-8", "replace")
