"""Compare the peaks of the ranks of one distributed run: which is the worst, and what it holds more than the others."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ligerprof.analyzers.attribution.user_rules import UserRule
from ligerprof.analyzers.explain.analysis import explain
from ligerprof.analyzers.explain.diff import PeakDiff, diff_peaks
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.analyzers.explain.rank_causes import ModuleWeights, RankCause, causes
from ligerprof.roles import Role
from ligerprof.serialization import document, select


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPeak:
    """The peak of one rank.

    Attributes:
        source: its snapshot file.
        weights: its parts of the modules, by name with `*` for each index; {} if not known.
    """

    rank: int
    source: Path
    report: PeakReport
    weights: Mapping[str, ModuleWeights] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """An entry of `ranks` in the JSON."""
        names = ("device", "peak_bytes", "reserved_bytes", "complete", "peak_phase", "phases", "roles")
        return select(
            self, "rank", "source", *(f"report.{name}" for name in names), "oom=report.out_of_memory", "report.notes"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleSpread:
    """The ranks that hold the least and the most of a role at their peaks."""

    role: Role
    least: RankPeak
    most: RankPeak

    @property
    def difference_bytes(self) -> int:
        """What the one holds more than the other."""
        return self.most.report.roles[self.role] - self.least.report.roles[self.role]

    def to_json(self) -> dict[str, Any]:
        """An entry of `differences` in the JSON."""
        least_bytes, most_bytes = (each.report.roles[self.role] for each in (self.least, self.most))
        ranks = {"least_rank": self.least.rank, "most_rank": self.most.rank}
        sizes = {"least_bytes": least_bytes, "most_bytes": most_bytes, "difference_bytes": self.difference_bytes}
        return {"role": self.role.value, **ranks, **sizes}


@dataclass(frozen=True, kw_only=True)
class RanksReport:
    """The peaks of several ranks.

    Attributes:
        ranks: the worst first: those that ran out of memory, then by peak; equal ones by rank.
    """

    ranks: tuple[RankPeak, ...]

    @cached_property
    def difference(self) -> PeakDiff:
        """From the rank with the lowest peak to the worst."""
        return diff_peaks(self.lowest.report, self.worst.report)

    @property
    def worst(self) -> RankPeak:
        """The rank that fails first."""
        return self.ranks[0]

    @property
    def highest(self) -> RankPeak:
        """The rank with the highest peak, which may be another one if ranks ran out of memory."""
        return max(self.ranks, key=lambda each: (each.report.peak_bytes, -each.rank))

    @property
    def lowest(self) -> RankPeak:
        """The rank with the lowest peak."""
        return min(self.ranks, key=lambda each: (each.report.peak_bytes, each.rank))

    @property
    def spreads(self) -> list[RoleSpread]:
        """The roles whose bytes differ between ranks, the largest difference first."""
        spreads = [
            RoleSpread(
                role=role,
                least=min(self.ranks, key=lambda each: each.report.roles[role]),
                most=max(self.ranks, key=lambda each: each.report.roles[role]),
            )
            for role in Role
        ]
        differing = [spread for spread in spreads if spread.difference_bytes]
        return sorted(differing, key=lambda spread: -spread.difference_bytes)

    @cached_property
    def causes(self) -> dict[int, tuple[RankCause, ...]]:
        """Why each rank holds more than the one with the lowest peak, as far as the recordings show it."""
        return {each.rank: causes(each, self.lowest) for each in self.ranks if each is not self.lowest}

    def causes_json(self) -> list[dict[str, Any]]:
        """`causes` in the JSON: an entry for each reason."""
        return [{"rank": rank, **cause.to_json()} for rank, found in self.causes.items() for cause in found]

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of all ranks, each with the ranks that it is about."""
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for each in sorted(self.ranks, key=lambda each: each.rank):
            for note in each.report.notes:
                ranks_of[note].append(each.rank)
        return tuple(f"{self._named(ranks)}: {note}" for note, ranks in ranks_of.items())

    def _named(self, ranks: Sequence[int]) -> str:
        if len(ranks) == len(self.ranks):
            return "every rank"
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof explain FOLDER --json`."""
        changed = [group for group in self.difference.groups if group.difference_bytes]
        figures = {"difference_bytes": self.difference.difference_bytes}
        compared = {"worst_rank": self.worst.rank, "lowest_rank": self.lowest.rank}
        reasons = {"causes": self.causes_json()}
        blocks = {"blocks": [group.to_json() for group in changed]}
        return document(
            "ranks",
            compared,
            figures,
            select(self, "ranks", "differences=spreads"),
            reasons,
            blocks,
            select(self, "notes"),
        )


def explain_ranks(
    sources: Mapping[int, Path],
    *,
    device_index: int | None = None,
    rules: Sequence[UserRule] = (),
    weights_of: Callable[[Path], Mapping[str, ModuleWeights]] = lambda _source: {},
) -> RanksReport:
    """Explain the snapshot of each rank, one after the other; arguments and errors as in `analyze`.

    Args:
        weights_of: what a rank holds of each module, by its snapshot file.
    """
    found = [
        RankPeak(
            rank=rank,
            source=source,
            report=explain(source, device_index=device_index, rules=rules),
            weights=weights_of(source),
        )
        for rank, source in sources.items()
    ]
    found.sort(key=lambda each: (each.report.out_of_memory is None, -each.report.peak_bytes, each.rank))
    return RanksReport(ranks=tuple(found))
