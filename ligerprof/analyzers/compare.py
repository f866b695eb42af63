"""Compare estimates, runs and snapshots: the peak of each, and its difference from a reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ligerprof.analyzers.result_reader import FailureFigures, Figures, ResultReader
from ligerprof.errors import RecipeError, ResultFormatError
from ligerprof.roles import Backend, Role
from ligerprof.serialization import SCHEMA, JsonKeys, document

if TYPE_CHECKING:
    from ligerprof.analyzers.explain.peak import PeakReport


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


def figures_from_peak(report: "PeakReport", source: str) -> Figures:
    """The figures of an explained snapshot."""
    failed = report.out_of_memory
    oom = None
    if failed is not None and not failed.failure.caught:
        oom = FailureFigures(
            requested_bytes=failed.requested_bytes,
            allocated_bytes=failed.allocated_bytes,
            phase=failed.failure.phase,
            step=failed.failure.step,
            roles=failed.roles,
        )
    return Figures(
        source=source,
        backend=Backend.SNAPSHOT,
        peak_bytes=report.peak_bytes,
        phases=report.phases,
        roles=report.roles,
        oom=oom,
        remedies=tuple(one.name for one in report.suggestions if one.lets_pass),
    )


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
