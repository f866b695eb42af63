"""Compare the peaks of the ranks of one distributed run: which is the worst, what it holds more, and why."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ligerprof.analyzers.attribution.rules import UserRule
from ligerprof.analyzers.explain.analysis import explain
from ligerprof.analyzers.explain.groups import BlockGroup
from ligerprof.analyzers.explain.peak import PeakDiff, PeakReport, diff_peaks
from ligerprof.models.architectures import without_indices
from ligerprof.roles import Role
from ligerprof.serialization import document, select
from ligerprof.units import format_bytes

_LOSS = (Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES)
_KEPT = (Role.ACTIVATIONS, Role.CHECKPOINTS)
_MOST_NAMES = 3


class ModuleWeights(NamedTuple):
    """Modules of one name on one rank, `*` for each index: how many there are, and the bytes of their weights."""

    modules: int
    size_bytes: int


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


class CauseKind(str, Enum):
    """In what two ranks differ."""

    MODULES = "modules"
    LAYERS = "layers"
    SHARDS = "shards"
    MICRO_BATCHES = "micro_batches"
    SIZES = "sizes"
    LOSS = "loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCause:
    """One reason why a rank holds more than the rank with the lowest peak.

    Attributes:
        size_bytes: of weights for layers and shards, of blocks at the peaks for the others, of both for modules.
        text: a clause for people.
    """

    kind: CauseKind
    size_bytes: int
    modules: tuple[str, ...]
    text: str

    def to_json(self) -> dict[str, Any]:
        """An entry of `causes` in the JSON."""
        return select(self, "kind", "bytes=size_bytes", "modules", "text")


def causes(rank: RankPeak, lowest: RankPeak) -> tuple[RankCause, ...]:
    """What a rank holds more than the lowest one, and why as far as the recordings show it; the largest first."""
    found = [*_weights(rank, lowest), *_activations(rank, lowest), *_loss(rank, lowest)]
    return tuple(sorted((cause for cause in found if cause.size_bytes > 0), key=lambda cause: -cause.size_bytes))


def _weights(rank: RankPeak, lowest: RankPeak) -> Iterator[RankCause]:
    mine, others = rank.weights, lowest.weights
    if not mine or not others:
        return
    only = {name: held.size_bytes for name, held in mine.items() if name not in others}
    if only:
        size_bytes = sum(only.values())
        kept_bytes = _kept_bytes(rank, only)
        text = f"has {_named(only)}, {format_bytes(size_bytes)} of weights"
        text += f" and {format_bytes(kept_bytes)} of activations" if kept_bytes else ""
        yield _cause(CauseKind.MODULES, size_bytes + kept_bytes, only, text)
    both = [name for name in mine if name in others]
    more = {name: mine[name].size_bytes - others[name].size_bytes for name in both}
    repeated = [name for name in both if mine[name].modules != others[name].modules]
    if repeated:
        size_bytes = sum(more[name] for name in repeated)
        counts = {(mine[name].modules, others[name].modules) for name in repeated}
        how = " and ".join(f"{count} instead of {other}" for count, other in sorted(counts, reverse=True))
        text = f"has {how} of {_named(dict.fromkeys(repeated, 0))}, {format_bytes(size_bytes)} of weights"
        yield _cause(CauseKind.LAYERS, size_bytes, repeated, text)
    padded = {name: more[name] for name in both if name not in repeated and more[name] > 0}
    if padded:
        size_bytes = sum(padded.values())
        text = f"has larger shards of {_named(padded)}, {format_bytes(size_bytes)} of weights"
        yield _cause(CauseKind.SHARDS, size_bytes, padded, text)


def _activations(rank: RankPeak, lowest: RankPeak) -> Iterator[RankCause]:
    mine, others = _of_layers(rank.report.blocks), _of_layers(lowest.report.blocks)
    often: dict[str, int] = defaultdict(int)
    larger: dict[str, int] = defaultdict(int)
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for key, held in mine.items():
        other = others.get(key)
        if other is None:
            continue
        difference_bytes = held.size_bytes * held.blocks - other.size_bytes * other.blocks
        if held.size_bytes == other.size_bytes and held.blocks > other.blocks:
            often[key[0]] += difference_bytes
            counts[held.blocks, other.blocks] += difference_bytes
        elif held.blocks == other.blocks and held.size_bytes > other.size_bytes:
            larger[key[0]] += difference_bytes
    if often:
        count, other_count = max(counts, key=lambda pair: counts[pair])
        size_bytes = _kept_bytes(rank, often) - _kept_bytes(lowest, often)
        text = (
            f"keeps activations of more micro-batches, {count} instead of {other_count} blocks of a kind in a layer:"
            f" {_named(often)}, {format_bytes(size_bytes)}"
        )
        yield _cause(CauseKind.MICRO_BATCHES, size_bytes, often, text)
    if larger:
        size_bytes = sum(larger.values())
        text = f"keeps as many, but larger activations in {_named(larger)}, {format_bytes(size_bytes)}"
        yield _cause(CauseKind.SIZES, size_bytes, larger, text)


def _kept_bytes(rank: RankPeak, modules: Collection[str]) -> int:
    return sum(
        block.size_bytes
        for block in rank.report.blocks
        if block.role in (*_KEPT, *_LOSS) and module_kind(block.module) in modules
    )


class _Kept(NamedTuple):
    """Blocks of one kind in the layer that has most of them: how many, and the bytes of one on average."""

    blocks: int
    size_bytes: int


def _of_layers(blocks: tuple[BlockGroup, ...]) -> dict[tuple[str, ...], _Kept]:
    """Activations by module, line and keeper."""
    sums: dict[tuple[str, ...], dict[int | None, list[int]]] = defaultdict(dict)
    for block in blocks:
        if block.role in _KEPT and block.module and block.frame:
            # not every recording names the operation that made what is kept
            key = (module_kind(block.module), block.frame, block.kept_by or block.operation)
            found = sums[key].setdefault(block.layer, [0, 0])
            found[0] += block.count
            found[1] += block.size_bytes
    return {
        key: _Kept(count, size_bytes // count)
        for key, layers in sums.items()
        for count, size_bytes in [max(layers.values())]
    }


def _loss(rank: RankPeak, lowest: RankPeak) -> Iterator[RankCause]:
    mine, others = (sum(each.report.roles[role] for role in _LOSS) for each in (rank, lowest))
    if mine and not others:
        yield _cause(CauseKind.LOSS, mine, (), f"computes the loss, {format_bytes(mine)} of logits and their gradients")


def _cause(kind: CauseKind, size_bytes: int, modules: Any, text: str) -> RankCause:
    return RankCause(kind=kind, size_bytes=size_bytes, modules=tuple(modules), text=text)


def module_kind(name: str) -> str:
    """The name of a module with `*` instead of each index."""
    return without_indices(f".{name}")[1:]


def _named(sizes: Mapping[str, int]) -> str:
    """The names of modules, the largest first; what layers share is named once."""
    ordered = sorted(sizes, key=lambda name: -sizes[name])
    names = list(dict.fromkeys(name.partition("*")[0] + "*" if "*" in name else name for name in ordered))
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


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
        blocks = [group.to_json() for group in self.difference.groups if group.difference_bytes]
        return document(
            "ranks",
            select(self, "worst_rank=worst.rank", "lowest_rank=lowest.rank", "difference.difference_bytes"),
            select(self, "ranks", "differences=spreads"),
            {"causes": self.causes_json(), "blocks": blocks},
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
