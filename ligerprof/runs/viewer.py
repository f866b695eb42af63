"""Serve a run with TensorBoard: what must be there, which port, and that it ends when we do."""

import importlib.util
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
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
_START_SECONDS = 60.0
_STOP_SECONDS = 5.0
_LONGEST_REASON = 300


class ViewerError(LigerprofError):
    """TensorBoard has nothing to show, or does not start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """A TensorBoard that answers.

    Attributes:
        address: where a browser finds it; of the profiler's tab where the folder holds a trace.
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
    """Run TensorBoard with the PyTorch profiler plugin; it has answered once when this is entered, and ends with it.

    Args:
        run: a run directory, a folder of them, or any folder with traces or summaries.
        port: 0 takes any free one; None takes TensorBoard's own, or any free one where that is taken.

    Raises:
        MissingDependencyError: TensorBoard or the plugin is not installed.
        ViewerError: nothing to show, a taken port, or TensorBoard does not come up.
    """
    _require_packages()
    folder = log_folder(run)
    port = _choose_port(host, port)
    with tempfile.TemporaryFile() as log, _started(folder, host, port, log) as process:
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        _await_answer(process, address, log)
        tab = _PROFILER_TAB if _holds(folder, TRACES) else ""
        yield Serving(address=f"{address}{tab}", process=process)


def log_folder(run: Path) -> Path:
    """The folder that TensorBoard is given: a run's tensorboard/, or all runs below.

    Raises:
        ViewerError: neither a trace nor a summary in it.
    """
    folder = run / TENSORBOARD if (run / TENSORBOARD).is_dir() else run
    if not (_holds(folder, TRACES) or _holds(folder, _SUMMARIES)):
        raise ViewerError(f"{run}: nothing for TensorBoard in it. Give a directory that `ligerprof step` wrote.")
    return folder


def _holds(folder: Path, pattern: str) -> bool:
    return next(folder.rglob(pattern), None) is not None


def _require_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing).replace("_", "-")
        raise MissingDependencyError(f"{names} is not installed. Try: pip install 'ligerprof[tensorboard]'.")


def _choose_port(host: str, port: int | None) -> int:
    wanted = [port] if port is not None else [DEFAULT_PORT, 0]
    for candidate in wanted:
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(host, candidate, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                # as TensorBoard listens: a port that a server has just left is free
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                free: int = probe.getsockname()[1]
                return free
        except OSError as error:
            reason = error.strerror
    raise ViewerError(f"{host}:{port if port is not None else DEFAULT_PORT}: {reason}. Try another --port or --host.")


@contextmanager
def _started(folder: Path, host: str, port: int, log: IO[bytes]) -> Iterator["subprocess.Popen[bytes]"]:
    arguments = ["--logdir", str(folder), "--host", host, "--port", str(port)]
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


def _await_answer(process: "subprocess.Popen[bytes]", address: str, log: IO[bytes]) -> None:
    # no proxy stands between us and our own server
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    give_up = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < give_up:
        try:
            with opener.open(address, timeout=_STOP_SECONDS):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.1)
    raise ViewerError(f"TensorBoard does not answer at {address}: {_last_line(log)}")


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").split("\n")
    return next((line.strip()[:_LONGEST_REASON] for line in reversed(lines) if line.strip()), "it said nothing")
