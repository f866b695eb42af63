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
# such as `TensorBoard 2.21.0 at http://127.0.0.1:6006/ (Press CTRL+C to quit)`
_ADDRESS = re.compile(r" at http://\S*:(\d+)/")
# TensorBoard imports its plugins first, which takes long on a busy machine
_START_SECONDS = 300.0
_STOP_SECONDS = 5.0


class ViewerError(LigerprofError):
    """TensorBoard has no data, or does not start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """A running TensorBoard; its address is that of the profiler's tab if the folder contains a trace."""

    address: str
    process: "subprocess.Popen[bytes]"

    def wait(self) -> None:
        """Wait until the server ends; a ViewerError is raised if it fails."""
        if (code := self.process.wait()) != 0:
            raise ViewerError(f"TensorBoard ended with exit code {code}. Start it again.")


@contextmanager
def serve(run: Path, *, host: str, port: int | None) -> Iterator[Serving]:
    """Run TensorBoard with the PyTorch profiler plugin: it listens once the context is entered, and ends at exit.

    Args:
        run: a run directory, a folder of them, or any folder with traces or summaries.
        port: 0: any free port; None: 6006, or one of the next if that is taken.

    Raises:
        MissingDependencyError: TensorBoard or the plugin is not installed.
        ViewerError: the folder has no data, the address is not available, or TensorBoard does not start.
    """
    _require_packages()
    folder = run / TENSORBOARD if (run / TENSORBOARD).is_dir() else run
    has_trace = any(folder.rglob(TRACES))
    if not has_trace and not any(folder.rglob("events.out.tfevents.*")):
        raise ViewerError(f"{run}: it holds nothing for TensorBoard. Give a directory that `ligerprof step` wrote.")
    _require_address(host, port)
    with tempfile.TemporaryFile() as log, _started(folder, host, port, log) as process:
        chosen = _await_port(process, log)
        tab = "#pytorch_profiler" if has_trace else ""
        yield Serving(address=f"http://{f'[{host}]' if ':' in host else host}:{chosen}/{tab}", process=process)


def _require_packages() -> None:
    packages = ("tensorboard", "torch-tb-profiler")
    missing = [name for name in packages if importlib.util.find_spec(name.replace("-", "_")) is None]
    if missing:
        raise MissingDependencyError(f"{' and '.join(missing)} is not installed. Try: pip install {' '.join(missing)}.")


def _require_address(host: str, port: int | None) -> None:
    """Raise if the address is not available; TensorBoard itself chooses the port."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # like TensorBoard, count a port that a server has just left as free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        place = f"{host}:{DEFAULT_PORT if port is None else port}"
        raise ViewerError(f"{place}: {error.strerror}. Try another --port or --host.") from None


@contextmanager
def _started(folder: Path, host: str, port: int | None, log: IO[bytes]) -> Iterator["subprocess.Popen[bytes]"]:
    arguments = ["--logdir", str(folder), "--host", host, *([] if port is None else ["--port", str(port)])]
    command = [sys.executable, "-m", "ligerprof.runs.sweep.guard", sys.executable, "-m", "tensorboard.main", *arguments]
    # the guard ends the server when its stdin is closed, also if this process is killed
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_port(process: "subprocess.Popen[bytes]", log: IO[bytes]) -> int:
    give_up = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < give_up:
        if (found := _ADDRESS.search(_read(log))) is not None:
            return int(found.group(1))
        time.sleep(0.1)
    lines = [line.strip()[:300] for line in _read(log).splitlines() if line.strip()]
    raise ViewerError(f"TensorBoard does not start: {lines[-1] if lines else 'it printed nothing'}")


def _read(log: IO[bytes]) -> str:
    """The log so far; pread leaves the position, which the server shares, at the end."""
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode("utf-8", "replace")
