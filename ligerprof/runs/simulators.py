"""Processes that simulate recipes ahead of the search that asks for them, and share one import of torch."""

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ligerprof.analyzers.search.budget import Reserved
from ligerprof.errors import LigerprofError
from ligerprof.recipe.conflicts import require_supported
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase

if TYPE_CHECKING:
    from ligerprof.runs.outcome import OutOfMemory, StepOutcome

_SERVER = "ligerprof.runs.simulated.server"
# numpy's BLAS starts a thread per core when it is imported, and a process with threads must not fork
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}

_END_SECONDS = 1.0


class Simulators:
    """Simulates recipes in other processes, which start when the first recipes are announced.

    Every result is what this process would compute. Whatever fails in another process is left to this one, so that
    errors, and what they say, are the same.

    Args:
        count: number of processes; with 0, nothing is simulated elsewhere.

    Attributes:
        count: as given; 0 after `close`, or if no process can be started.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._idle: list[socket.socket] = []
        self._busy: dict[socket.socket, str] = {}
        self._waiting: dict[str, TrainingRecipe] = {}
        self._done: dict[str, Reserved | None] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def expect(self, recipes: Sequence[TrainingRecipe]) -> None:
        """Simulate these recipes while nothing else is asked for, in this order."""
        if not self.count:
            return
        started = {*self._done, *self._busy.values()}
        self._waiting = {key: recipe for recipe in recipes if (key := repr(recipe)) not in started}
        if self._process is None and self._waiting:
            with suppress(LigerprofError):
                require_supported(recipes[0], command="simulate", simulated=True)
                self._start()
        self._assign()

    def simulate(self, recipe: TrainingRecipe) -> Reserved | None:
        """The result of a recipe; None if no process can compute it."""
        key = repr(recipe)
        if key not in self._done and key not in self._busy.values():
            self._waiting = {key: recipe, **self._waiting}
        while key not in self._done and (self._idle or self._busy):
            self._assign()
            self._receive()
        self._waiting.pop(key, None)
        return self._done.get(key)

    def close(self) -> None:
        """End the processes, also while they simulate."""
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle, self._busy, self._waiting, self.count = [], {}, {}, 0
        if self._process is not None:
            # it is importing if it does not end by itself
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        pairs = [socket.socketpair() for _ in range(self.count)]
        theirs = [pair[1].fileno() for pair in pairs]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _SERVER, *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=theirs,
                start_new_session=True,
                env={**os.environ, **_ONE_THREAD},
            )
        except OSError:
            self.count = 0
        self._idle = [ours for ours, _ in pairs] if self.count else []
        for ours, other in pairs:
            other.close()
            if not self.count:
                ours.close()

    def _assign(self) -> None:
        while self._waiting and self._idle:
            key = next(iter(self._waiting))
            connection = self._idle.pop(0)
            try:
                connection.sendall(json.dumps(self._waiting[key].to_json()).encode() + b"\n")
            except OSError:
                connection.close()
                continue
            del self._waiting[key]
            self._busy[connection] = key

    def _receive(self) -> None:
        """Wait for the next result, or for the end of a process."""
        if not self._busy:
            return
        for connection in select.select(list(self._busy), [], [])[0]:
            key = self._busy.pop(connection)
            answer = read_line(connection)
            self._done[key] = _reserved_from_json(answer)
            if answer is None:
                connection.close()
            else:
                self._idle.append(connection)


def reserved(outcome: "StepOutcome") -> Reserved:
    """What a simulated step reserved."""
    return Reserved(
        first_bytes=outcome.first_step_reserved_bytes,
        steady_bytes=outcome.reserved_bytes,
        second_bytes=outcome.second_step_reserved_bytes or 0,
        evaluation_bytes=outcome.evaluation_reserved_bytes or 0,
        fits=outcome.oom is None,
        failed_in=None if outcome.oom is None else _failed_in(outcome, outcome.oom),
    )


def _failed_in(outcome: "StepOutcome", oom: "OutOfMemory") -> str | None:
    """The moment in which memory ran out, None for the build of the model."""
    from ligerprof.analyzers.estimate import Moment

    if oom.phase is Phase.EVALUATION:
        return str(Moment.EVALUATION)
    if oom.step < 2:
        return str(Moment.FIRST) if oom.step else None
    is_second = oom.step == 2 and outcome.second_step_reserved_bytes is not None
    return str(Moment.SECOND if is_second else Moment.STEADY)


def read_line(connection: socket.socket) -> Any:
    """The next JSON object from the other end, or None if it has closed the connection."""
    content = b""
    while not content.endswith(b"\n"):
        try:
            part = connection.recv(2**16)
        except OSError:
            return None
        if not part:
            return None
        content += part
    return json.loads(content)


def _reserved_from_json(answer: dict[str, Any] | None) -> Reserved | None:
    return Reserved(**answer) if answer else None
