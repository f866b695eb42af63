"""Put estimates, runs and snapshots side by side: what each says of the peak, and how far it is from a reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.analyzers.result_reader import Figures, ResultReader
from ligerprof.errors import RecipeError, ResultFormatError
from ligerprof.roles import Backend, Role

_SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Several sources beside each other.

    Attributes:
        reference: index of the one that the others are held against.
    """

    columns: tuple[Figures, ...]
    reference: int

    @property
    def is_of_one_step(self) -> bool:
        """Whether all figures are of one step and some predict it: then what differs is an error."""
        predicted = any(column.backend in (Backend.ESTIMATED, Backend.SIMULATED) for column in self.columns)
        return predicted and len({column.file for column in self.columns}) == 1

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
        backend=Backend.SNAPSHOT,
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
    result = ResultReader(values, source)
    if (schema := result.get("schema")) != _SCHEMA:
        raise ResultFormatError(f"{source}: schema {schema!r:.40} is not {_SCHEMA}. Was it written by another version?")
    kind = result.get("kind")
    if kind == "step":
        beside = result.get("estimate")
        own = result.figures(result.backend())
        return (own, *_figures_within(beside, f"{source} (estimate)", Backend.ESTIMATED))
    if kind == "estimate":
        beside = result.get("simulated")
        own = result.figures(Backend.ESTIMATED)
        return (own, *_figures_within(beside, f"{source} (simulated)", Backend.SIMULATED))
    if kind == "peak":
        return (result.figures(Backend.SNAPSHOT),)
    raise ResultFormatError(
        f"{source}: kind {kind!r:.40} cannot be compared. Give what step, estimate or explain wrote."
    )


def _figures_within(values: object, source: str, backend: Backend) -> tuple[Figures, ...]:
    return () if values is None else (ResultReader(values, source).figures(backend),)


def _ratio(size_bytes: int, reference_bytes: int) -> float | None:
    return size_bytes / reference_bytes - 1 if reference_bytes else None
