"""What a study's parts ask for and the rows do not hold yet, and the command that runs it."""

from collections.abc import Iterable, Iterator, Sequence

from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.study.found import Found
from ligerprof.reports.study.tables import markdown_table
from ligerprof.runs.study.file import Part
from ligerprof.runs.sweep.borders import UNITS, line_edges
from ligerprof.runs.sweep.grid import cell_key, expand
from ligerprof.runs.sweep.runner import is_beyond
from ligerprof.units import size_text

# part, kernel set, how many of its steps have rows, and what is missing
Gap = tuple[str, str, str, str]


def find_gaps(found: Found) -> tuple[Gap, ...]:
    """What is missing, in the study's order; steps above one that was out of memory do not count."""
    return tuple(gap for part in found.study.parts for gap in (*_steps(part, found), *_search(part, found)))


def gaps_in_words(gaps: Iterable[Gap]) -> str:
    """The parts with the kernels for which they lack something, such as `paper (none; all)`."""
    kernels: dict[str, list[str]] = {}
    for part, name, *_ in gaps:
        kernels.setdefault(part, []).append(name)
    return ", ".join(f"{part} ({'; '.join(names)})" for part, names in kernels.items())


def gaps_section(found: Found, gaps: Sequence[Gap], command: str) -> list[str]:
    """A row per part and kernel set, and the command that runs what is missing.

    Args:
        command: that runs this study, such as `ligerprof study`.
    """
    parts = ",".join(dict.fromkeys(part for part, *_ in gaps))
    return [
        *markdown_table(["part", "kernels", "measured", "not measured yet, batch x sequence"], gaps),
        "In a folder whose `results.jsonl` holds the rows of this report, this runs what is missing:",
        "",
        "```",
        f"{command} --only {parts}{_limit_flag(found)} -o FOLDER",
        "```",
        "",
    ]


def _recipes(part: Part, found: Found) -> tuple[TrainingRecipe, ...]:
    """The steps of a part, on the device and under the limit of the rows."""
    grid = found.study.grid(part, device=found.cells[0].recipe.device, memory_limit_bytes=found.limit_bytes)
    return expand([grid], lambda _: None)[0]


def _limit_flag(found: Found) -> str:
    """The option that sets the limit of the rows, where the study's own is another."""
    own = {limit for part in found.study.parts for limit in found.study.limits(part)}
    limit_bytes = found.limit_bytes
    return "" if limit_bytes is None or limit_bytes in own else f" --memory-limit {size_text(limit_bytes)}"


def _steps(part: Part, found: Found) -> Iterator[Gap]:
    keys = {cell.key for cell in found.cells}
    asked: dict[str, list[TrainingRecipe]] = {}
    for recipe in _recipes(part, found):
        asked.setdefault(found.title(recipe), []).append(recipe)
    for kernels, recipes in asked.items():
        lacking = [one for one in recipes if cell_key(one) not in keys and not is_beyond(one, found.cells)]
        if lacking:
            measured = sum(cell_key(recipe) in keys for recipe in recipes)
            missing = ", ".join(f"{recipe.batch} x {recipe.seq:,}" for recipe in lacking)
            yield part.name, kernels, f"{measured} of {len(recipes)}", missing


def _search(part: Part, found: Found) -> Iterator[Gap]:
    """The borders of a part that searches them, where they are not found to the last step."""
    if part.find_limit is None:
        return
    lines: dict[str, TrainingRecipe] = {}
    for recipe in _recipes(part, found):
        lines.setdefault(found.title(recipe), recipe)
    for kernels, recipe in lines.items():
        largest, smallest = line_edges(found.cells, recipe, part.find_limit)
        if largest is None or smallest is None or smallest - largest > UNITS[part.find_limit]:
            above = "" if largest is None else f" above {largest:,}"
            below = "" if smallest is None else f" below {smallest:,}"
            yield part.name, kernels, "", f"border{above}{below}"
