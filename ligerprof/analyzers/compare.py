"""Put estimates, runs and snapshots side by side: what each says of the peak, and how far it is from a reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ligerprof.analyzers.peak import PeakReport
from ligerprof.errors import RecipeError, ResultFormatError
from ligerprof.roles import MemoryBreakdown, Phase, Role

Backend = Literal["estimated", "simulated", "measured", "snapshot"]
_BACKENDS: tuple[Backend, ...] = ("simulated", "measured")
_SCHEMA = 1
# nothing that a byte count is read from is larger, and str() refuses integers of many thousand digits
_MAX_BYTES = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What one source says of one training step's memory.

    Attributes:
        source: the file or folder, as the user named it.
        backend: how the figures came about.
        phases: the highest bytes of each phase, where the source has them.
        roles: who holds the peak.
    """

    source: str
    backend: Backend
    peak_bytes: int
    phases: Mapping[Phase, int]
    roles: MemoryBreakdown

    def to_json(self) -> dict[str, Any]:
        """An entry of `columns` in the comparison's JSON."""
        return {
            "source": self.source,
            "backend": self.backend,
            "peak_bytes": self.peak_bytes,
            "phases": {phase.value: size_bytes for phase, size_bytes in self.phases.items()},
            "roles": self.roles.to_json(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Several sources beside each other.

    Attributes:
        reference: index of the one that the others are held against.
    """

    columns: tuple[Figures, ...]
    reference: int

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof compare --json`: each column with its distance from the reference."""
        against = self.columns[self.reference]
        return {
            "schema": _SCHEMA,
            "kind": "compare",
            "reference": self.reference,
            "columns": [
                {
                    **column.to_json(),
                    "peak_difference_bytes": column.peak_bytes - against.peak_bytes,
                    "error_ratio": _ratio(column.peak_bytes, against.peak_bytes),
                    "role_difference_bytes": {role.value: column.roles[role] - against.roles[role] for role in Role},
                }
                for column in self.columns
            ],
        }


def compare(columns: Sequence[Figures], *, reference: int = 0) -> Comparison:
    """Hold figures against one of them.

    Raises:
        RecipeError: fewer than two of them, or `reference` is the index of none.
    """
    if len(columns) < 2:
        raise RecipeError("there is one set of figures: nothing to compare it with. Name another run or file.")
    if not 0 <= reference < len(columns):
        raise RecipeError(f"--reference {reference + 1}: there are {len(columns)} columns. Choose 1 to {len(columns)}.")
    return Comparison(columns=tuple(columns), reference=reference)


def figures_from_peak(report: PeakReport, source: str) -> Figures:
    """The figures of a snapshot that was explained."""
    return Figures(
        source=source,
        backend="snapshot",
        peak_bytes=report.peak_bytes,
        phases=report.phases,
        roles=report.roles,
    )


def figures_from_json(values: object, source: str) -> tuple[Figures, ...]:
    """Read what `step`, `estimate` or `explain` wrote; the file is not trusted.

    Returns:
        The figures themselves, then those that stand beside them in the same file: a step's
        estimate, or an estimate's simulation.

    Raises:
        ResultFormatError: a file of none of these commands, or one that was changed.
    """
    result = _Reader(values, source)
    if (schema := result.get("schema")) != _SCHEMA:
        raise ResultFormatError(f"{source}: schema {schema!r:.40} is not {_SCHEMA}. Was it written by another version?")
    kind = result.get("kind")
    if kind == "step":
        beside = result.get("estimate")
        own = result.figures(result.backend())
        return (own,) if beside is None else (own, _Reader(beside, f"{source} (estimate)").figures("estimated"))
    if kind == "estimate":
        beside = result.get("simulated")
        own = result.figures("estimated")
        return (own,) if beside is None else (own, _Reader(beside, f"{source} (simulated)").figures("simulated"))
    if kind == "peak":
        return (result.figures("snapshot"),)
    raise ResultFormatError(
        f"{source}: kind {kind!r:.40} cannot be compared. Give what step, estimate or explain wrote."
    )


def _ratio(size_bytes: int, reference_bytes: int) -> float | None:
    return size_bytes / reference_bytes - 1 if reference_bytes else None


class _Reader:
    """One JSON object of a file that is not trusted."""

    def __init__(self, values: object, source: str) -> None:
        if not isinstance(values, dict):
            raise ResultFormatError(f"{source}: not a JSON object. Give what step, estimate or explain wrote.")
        self._values: dict[str, Any] = values
        self._source = source

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def backend(self) -> Backend:
        word = self.get("backend")
        for known in _BACKENDS:
            if word == known:
                return known
        raise ResultFormatError(f"{self._source}: backend {word!r:.40} is none of {', '.join(_BACKENDS)}.")

    def figures(self, backend: Backend) -> Figures:
        return Figures(
            source=self._source,
            backend=backend,
            peak_bytes=self._size("peak_bytes", self.get("peak_bytes")),
            phases={Phase(word): size_bytes for word, size_bytes in self._sizes("phases", Phase).items()},
            roles=MemoryBreakdown.from_json(self._sizes("roles", Role)),
        )

    def _sizes(self, key: str, words: type[Phase] | type[Role]) -> dict[str, int]:
        sizes = self.get(key)
        if not isinstance(sizes, dict):
            raise ResultFormatError(f"{self._source}: {key!r} is missing or not an object. Write the file again.")
        known = {word.value for word in words}
        for word in sizes:
            if word not in known:
                raise ResultFormatError(
                    f"{self._source}: {word!r:.40} in {key!r} is unknown. Is it of a newer version?"
                )
        return {word: self._size(f"{key}.{word}", size_bytes) for word, size_bytes in sizes.items()}

    def _size(self, key: str, size_bytes: object) -> int:
        if not isinstance(size_bytes, int) or isinstance(size_bytes, bool) or not -_MAX_BYTES < size_bytes < _MAX_BYTES:
            raise ResultFormatError(f"{self._source}: {key!r} is no number of bytes. Write the file again.")
        return size_bytes
