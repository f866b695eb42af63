"""What the study's table asks for and the rows do not hold yet, and the command that measures it."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ligerprof.recipe.flags import size_text
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.study.facts import NONE, Facts, column_of, largest_and_smallest
from ligerprof.reports.study.text import table
from ligerprof.runs.study.cells import MEMORY_LIMIT_BYTES, PARTS, PROVIDERS, Part, adapt
from ligerprof.runs.sweep.borders import UNITS
from ligerprof.runs.sweep.cells import Cell
from ligerprof.runs.sweep.grid import cell_key, expand
from ligerprof.runs.sweep.runner import is_beyond


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """What a part lacks of one kernel set.

    Attributes:
        part: its name.
        kernels: as the tables' columns name them.
        measured: how many of its sizes have been, such as `1 of 8`; nothing for the search of a border.
        lacks: the sizes, or what the search has still to tell apart.
    """

    part: str
    kernels: str
    measured: str
    lacks: str


def find_gaps(facts: Facts) -> tuple[Gap, ...]:
    """What is not measured yet, sizes above one that was out of memory left out, in the study's order."""
    limit_bytes = facts.limit_bytes
    parts = [adapt(part, device="cuda", memory_limit_bytes=limit_bytes, providers=PROVIDERS) for part in PARTS]
    cells = {cell.key: cell for cell in facts.cells}
    return tuple(gap for part in parts for gap in (*_sizes(part, cells), *_search(part, facts)))


def gaps_in_words(gaps: Iterable[Gap]) -> str:
    """The parts with the kernels that they lack something of, such as `paper (none; all)`."""
    kernels: dict[str, list[str]] = {}
    for gap in gaps:
        kernels.setdefault(gap.part, []).append(gap.kernels)
    return ", ".join(f"{part} ({'; '.join(names)})" for part, names in kernels.items())


def not_measured(facts: Facts) -> list[str]:
    """A row a part and kernel set, then the command."""
    gaps = find_gaps(facts)
    if not gaps:
        return []
    rows = [[gap.part, gap.kernels, gap.measured, gap.lacks] for gap in gaps]
    return [
        *table(["part", "kernels", "measured", "not measured yet, batch x sequence"], rows),
        "With the rows of this report as its `results.jsonl`, a folder is gone on from, and nothing runs twice:",
        "",
        "```",
        _command(tuple(dict.fromkeys(gap.part for gap in gaps)), facts.limit_bytes),
        "```",
        "",
    ]


def _sizes(part: Part, cells: Mapping[str, Cell]) -> Iterator[Gap]:
    asked: dict[str, list[TrainingRecipe]] = {}
    for recipe in expand([part.grid], lambda _: None)[0]:
        asked.setdefault(column_of(recipe).title, []).append(recipe)
    for kernels, recipes in asked.items():
        open_ones = [recipe for recipe in recipes if not is_beyond(recipe, cells.values())]
        lacks = [f"{recipe.batch} x {recipe.seq:,}" for recipe in open_ones if cell_key(recipe) not in cells]
        if lacks:
            measured = sum(cell_key(recipe) in cells for recipe in recipes)
            yield Gap(part=part.name, kernels=kernels, measured=f"{measured} of {len(recipes)}", lacks=", ".join(lacks))


def _search(part: Part, facts: Facts) -> Iterator[Gap]:
    """The border of a part that searches one, where it is not found to the last step."""
    if part.axis is None:
        return
    largest, smallest = largest_and_smallest(facts.zero(NONE), part.axis)
    if largest is None or smallest is None or smallest - largest > UNITS[part.axis]:
        yield Gap(part=part.name, kernels=NONE.title, measured="", lacks=_span(largest, smallest))


def _span(largest: int | None, smallest: int | None) -> str:
    above = "" if largest is None else f" above {largest:,}"
    below = "" if smallest is None else f" below {smallest:,}"
    return f"border{above}{below}"


def _command(parts: tuple[str, ...], limit_bytes: int | None) -> str:
    limit = () if limit_bytes in (None, MEMORY_LIMIT_BYTES) else ("--memory-limit", size_text(limit_bytes))
    return shlex.join(["ligerprof", "study", "--only", ",".join(parts), *limit, "-o", "FOLDER"])
