"""Compare estimates, runs and snapshots: read the figures of each from untrusted JSON, and subtract a reference's."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ligerprof.errors import RecipeError, ResultFormatError
from ligerprof.roles import Backend, MemoryBreakdown, Phase, Role
from ligerprof.serialization import SCHEMA, JsonKeys, document, select

_OF_A_STEP = (Backend.SIMULATED, Backend.MEASURED)
# bound of a byte count; str() raises for integers of many thousand digits
_MAX_BYTES = 2**63
# of a suggestion
_NAME = re.compile(r"[a-z0-9-]{1,40}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureFigures:
    """A failed allocation of one source.

    Attributes:
        requested_bytes: None if unknown, like the others.
        roles: add up to `allocated_bytes`.
    """

    requested_bytes: int | None
    allocated_bytes: int | None
    phase: Phase | None
    step: int | None
    roles: MemoryBreakdown | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The memory figures of one training step from one source.

    Attributes:
        source: the file or folder, as the user named it.
        phases: peak bytes of each phase that the source has.
        oom: the failed allocation that the program did not catch, None if all fitted.
        remedies: names of the suggestions that would have let it pass, the cheapest first.
        rank: the rank of a step on several GPUs, if the figures are those of one of several.
    """

    source: str
    backend: Backend
    peak_bytes: int
    phases: Mapping[Phase, int]
    roles: MemoryBreakdown
    oom: FailureFigures | None = None
    remedies: tuple[str, ...] = ()
    rank: int | None = None

    @property
    def file(self) -> str:
        """The source without its suffix: `runs/001` for `runs/001 (estimate)`."""
        return self.source.partition(" (")[0]

    def to_json(self) -> dict[str, Any]:
        """An entry of `columns` in the comparison's JSON."""
        return select(self, "source", "backend", "rank", "peak_bytes", "phases", "roles", "oom", "remedies")


class ResultReader:
    """One JSON object of an untrusted file; invalid values raise a one-line ResultFormatError that names `source`."""

    def __init__(self, values: object, source: str) -> None:
        if not isinstance(values, dict):
            raise ResultFormatError(f"{source}: not a JSON object. Use the output of step, estimate or explain.")
        self._values: dict[str, Any] = values
        self._source = source

    def get(self, key: str) -> Any:
        """The unchecked value of a key; None if it is missing."""
        return self._values.get(key)

    def backend(self) -> Backend:
        """Whether the figures were measured or simulated."""
        if (word := self.get("backend")) not in _OF_A_STEP:
            raise ResultFormatError(f"{self._source}: backend {word!r:.40} is none of {', '.join(_OF_A_STEP)}.")
        return Backend(word)

    def figures(self, backend: Backend) -> Figures:
        """Peak, phases and roles."""
        return Figures(
            source=self._source,
            backend=backend,
            peak_bytes=self.size("peak_bytes"),
            phases={Phase(word): size_bytes for word, size_bytes in self._sizes("phases", Phase).items()},
            roles=MemoryBreakdown.from_json(self._sizes("roles", Role)),
            oom=self._oom(),
            remedies=tuple(self._remedies()),
        )

    def ranks(self) -> Iterator[Figures]:
        """The figures of each rank under `ranks`, except ranks whose peak has no roles."""
        backend, listed = self.backend(), self.get("ranks")
        for values in listed if isinstance(listed, list) else ():
            entry = ResultReader(values, f"{self._source} (ranks)")
            if entry.get("roles") is None:
                continue
            rank = entry.size("rank")
            own = ResultReader(values, f"{self._source} (rank {rank})")
            yield replace(own.figures(backend), rank=rank)

    def _remedies(self) -> Iterator[str]:
        """The names of the suggestions that would have let a failed allocation pass."""
        found = self.get("suggestions") or ()
        for values in found if isinstance(found, list) else ():
            suggestion = ResultReader(values, f"{self._source} (suggestions)")
            name = suggestion.text("name")
            if suggestion.get("lets_pass") is True and _NAME.fullmatch(name or ""):
                yield str(name)

    def _oom(self) -> FailureFigures | None:
        """The failed allocation under `oom`; None if there is none or the program caught it."""
        values = self.get("oom")
        if values is None:
            return None
        oom = ResultReader(values, f"{self._source} (oom)")
        if oom.get("caught") is True:
            return None
        phase = oom.text("phase")
        if phase is not None and phase not in set(Phase):
            raise ResultFormatError(f"{self._source}: phase {phase!r:.40} is unknown. Did a newer version write it?")
        return FailureFigures(
            requested_bytes=oom._size_or_none("requested_bytes"),
            allocated_bytes=oom._size_or_none("allocated_bytes"),
            phase=None if phase is None else Phase(phase),
            step=oom._size_or_none("step"),
            roles=None if oom.get("roles") is None else MemoryBreakdown.from_json(oom._sizes("roles", Role)),
        )

    def _size_or_none(self, key: str) -> int | None:
        return None if self.get(key) is None else self.size(key)

    def size(self, key: str) -> int:
        """A number of bytes."""
        return self._size(key, self.get(key))

    def number(self, key: str) -> float | None:
        """A finite number; None if it is null or missing."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
            raise ResultFormatError(f"{self._source}: {key!r} is not a finite number. Regenerate the file.")
        return float(value)

    def text(self, key: str) -> str | None:
        """A string; None if it is null or missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise ResultFormatError(f"{self._source}: {key!r} is not a string. Regenerate the file.")
        return value

    def moment(self, key: str) -> datetime | None:
        """A time with its zone; None if it is null or missing."""
        text = self.text(key)
        if text is None:
            return None
        with suppress(ValueError):
            if (found := datetime.fromisoformat(text)).tzinfo is not None:
                return found
        raise ResultFormatError(f"{self._source}: {key!r} is not a time with a zone. Regenerate the file.")

    def _sizes(self, key: str, words: type[Phase] | type[Role]) -> dict[str, int]:
        sizes = self.get(key)
        if not isinstance(sizes, dict):
            raise ResultFormatError(f"{self._source}: {key!r} is missing or not an object. Regenerate the file.")
        known = {word.value for word in words}
        if unknown := [word for word in sizes if word not in known]:
            raise ResultFormatError(
                f"{self._source}: {unknown[0]!r:.40} in {key!r} is unknown. Did a newer version write it?"
            )
        return {word: self._size(f"{key}.{word}", size_bytes) for word, size_bytes in sizes.items()}

    def _size(self, key: str, size_bytes: object) -> int:
        if not isinstance(size_bytes, int) or isinstance(size_bytes, bool) or not -_MAX_BYTES < size_bytes < _MAX_BYTES:
            raise ResultFormatError(f"{self._source}: {key!r} is not a number of bytes. Regenerate the file.")
        return size_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(JsonKeys):
    """Several sources in columns; `reference` is the index of the column that the others are compared with."""

    columns: tuple[Figures, ...]
    reference: int

    @property
    def is_of_one_step(self) -> bool:
        """Whether all columns describe one step and at least one predicts it, so that differences are errors."""
        if any(column.rank is not None for column in self.columns):
            return False
        predicted = any(column.backend in (Backend.ESTIMATED, Backend.SIMULATED) for column in self.columns)
        return predicted and len({column.file for column in self.columns}) == 1

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof compare --json`: each column with its difference from the reference."""
        columns = [column.to_json() | self._differences(column) for column in self.columns]
        return document("compare", {"reference": self.reference, "columns": columns})

    def _differences(self, column: Figures) -> dict[str, Any]:
        against = self.columns[self.reference]
        # a peak that was not reached has no error
        reached = column.oom is None and against.oom is None and against.peak_bytes
        return {
            "peak_difference_bytes": column.peak_bytes - against.peak_bytes,
            "error_ratio": column.peak_bytes / against.peak_bytes - 1 if reached else None,
            "role_difference_bytes": {role.value: column.roles[role] - against.roles[role] for role in Role},
        }


def compare(columns: Sequence[Figures], *, reference: int = 0) -> Comparison:
    """Compare figures with one of them.

    Raises:
        RecipeError: there are fewer than two columns, or `reference` is out of range.
    """
    if len(columns) < 2:
        raise RecipeError("only one set of figures, nothing to compare it with. Name another run or file.")
    if not 0 <= reference < len(columns):
        raise RecipeError(f"--reference {reference + 1}: there are {len(columns)} columns. Choose 1 to {len(columns)}.")
    return Comparison(columns=tuple(columns), reference=reference)


def figures_from_json(values: object, source: str) -> tuple[Figures, ...]:
    """Read the JSON of `step`, `estimate` or `explain`, checking every value.

    Returns:
        The file's own figures, then the second set if it has one: a step's estimate, or an
        estimate's simulation.

    Raises:
        ResultFormatError: the JSON is not from one of these commands, or has an invalid value.
    """
    result = _reader(values, source)
    kind = result.get("kind")
    if kind == "peak":
        return (result.figures(Backend.SNAPSHOT),)
    if kind not in ("step", "estimate"):
        raise ResultFormatError(
            f"{source}: kind {kind!r:.40} cannot be compared. Use the output of step, estimate or explain."
        )
    own = result.figures(result.backend() if kind == "step" else Backend.ESTIMATED)
    key, backend = ("estimate", Backend.ESTIMATED) if kind == "step" else ("simulated", Backend.SIMULATED)
    if (second := result.get(key)) is None:
        return (own,)
    return own, ResultReader(second, f"{source} ({key})").figures(backend)


def figures_of_ranks(values: object, source: str) -> tuple[Figures, ...]:
    """Read the ranks of the JSON of a step on several GPUs, in its order.

    Raises:
        ResultFormatError: the JSON is not from `step`, lacks several ranks, or has an invalid value.
    """
    result = _reader(values, source)
    if result.get("kind") != "step":
        raise ResultFormatError(f"{source}: not the output of step. --ranks needs a run on several GPUs.")
    found = tuple(result.ranks())
    if len(found) < 2:
        raise ResultFormatError(f"{source}: no ranks to compare. --ranks needs a run on several GPUs.")
    return found


def _reader(values: object, source: str) -> ResultReader:
    result = ResultReader(values, source)
    if (schema := result.get("schema")) != SCHEMA:
        raise ResultFormatError(f"{source}: schema {schema!r:.40} is not {SCHEMA}. Did another version write it?")
    return result
