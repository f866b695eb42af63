"""Processes that simulate recipes ahead of the search that asks for them, and share one import of torch."""

from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from ligerprof.analyzers.search.budget import Reserved
from ligerprof.errors import LigerprofError
from ligerprof.recipe.conflicts import require_supported
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase
from ligerprof.runs.simulated.worker import SERVER, SIMULATE, Worker

if TYPE_CHECKING:
    from ligerprof.runs.outcome import OutOfMemory, StepOutcome


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
        self._worker: Worker | None = None
        self._busy: dict[Connection, str] = {}
        self._waiting: dict[str, TrainingRecipe] = {}
        self._done: dict[str, Reserved | None] = {}

    def expect(self, recipes: Sequence[TrainingRecipe]) -> None:
        """Simulate these recipes while nothing else is asked for, in this order."""
        if not self.count:
            return
        started = {*self._done, *self._busy.values()}
        self._waiting = {key: recipe for recipe in recipes if (key := repr(recipe)) not in started}
        if self._worker is None and self._waiting:
            with suppress(LigerprofError):
                require_supported(recipes[0], command="simulate", simulated=True)
                try:
                    self._worker = Worker(quiet=True, server=SERVER)
                except OSError:
                    self.count = 0
        self._assign()

    def simulate(self, recipe: TrainingRecipe) -> Reserved | None:
        """The result of a recipe; None if no process can compute it."""
        key = repr(recipe)
        if key not in self._done and key not in self._busy.values():
            self._waiting = {key: recipe, **self._waiting}
        while key not in self._done and self._worker is not None:
            self._assign()
            self._receive()
        self._waiting.pop(key, None)
        return self._done.get(key)

    def close(self) -> None:
        for connection in self._busy:
            connection.close()
        self._busy, self._waiting, self.count = {}, {}, 0
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _assign(self) -> None:
        while self._worker is not None and self._waiting and len(self._busy) < self.count:
            key = next(iter(self._waiting))
            try:
                connection = self._worker.start(SIMULATE, self._waiting[key], record=False, repeat=True)
            except OSError:
                self.close()
                return
            del self._waiting[key]
            self._busy[connection] = key

    def _receive(self) -> None:
        """Wait for the next result, or for the end of a process."""
        for connection in wait(list(self._busy)) if self._busy else ():
            assert isinstance(connection, Connection)
            try:
                kind, value = connection.recv()
            except (EOFError, OSError):
                kind, value = "error", None
            if kind != "progress":
                self._done[self._busy.pop(connection)] = reserved(value) if kind == "outcome" else None
                connection.close()


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
