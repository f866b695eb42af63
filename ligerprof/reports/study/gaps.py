"""The steps of a study's parts that no row contains, and the command that runs them."""

from collections.abc import Iterable, Iterator, Sequence

from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.study.found import Found
from ligerprof.reports.study.tables import markdown_table
from ligerprof.runs.study.outline import Part
from ligerprof.runs.sweep.borders import UNITS, line_edges
from ligerprof.runs.sweep.grid import cell_key, expand
from ligerprof.runs.sweep.runner import is_beyond
from ligerprof.units import size_text

# part, kernel set, how many of its steps have rows, and what is missing
Gap = tuple[str, str, str, str]


def find_gaps(found: Found) -> tuple[Gap, ...]:
    """What is missing, in the study's order; steps above one that was out of memory do not count."""
    gaps: list[Gap] = []
    for part in found.study.parts:
        # on the device and under the limit of the rows
        grid = found.study.grid(part, device=found.cells[0].recipe.device, memory_limit_bytes=found.limit_bytes)
        by_kernels: dict[str, list[TrainingRecipe]] = {}
        for recipe in expand([grid], lambda _: None)[0]:
            by_kernels.setdefault(found.title(recipe), []).append(recipe)
        gaps += _steps(part, found, by_kernels)
        gaps += _searches(part, found, by_kernels)
    return tuple(gaps)


def gaps_in_words(gaps: Iterable[Gap]) -> str:
    """The parts with the kernel sets that lack something, such as `paper (none; all)`."""
    kernels: dict[str, list[str]] = {}
    for part, name, *_ in gaps:
        kernels.setdefault(part, []).append(name)
    return ", ".join(f"{part} ({'; '.join(names)})" for part, names in kernels.items())


def gaps_section(found: Found, gaps: Sequence[Gap], command: str) -> list[str]:
    """One row per part and kernel set, and the command that runs what is missing.

    Args:
        command: the command that runs this study, such as `ligerprof study`.
    """
    parts = ",".join(dict.fromkeys(part for part, *_ in gaps))
    own_limits = {limit for part in found.study.parts for limit in part.options.get("memory_limit_bytes", ())}
    limit_bytes = found.limit_bytes
    limit = "" if limit_bytes is None or limit_bytes in own_limits else f" --memory-limit {size_text(limit_bytes)}"
    return [
        *markdown_table(["part", "kernels", "measured", "not measured yet, batch x sequence"], gaps),
        "In a folder whose `results.jsonl` holds the rows of this report, this runs what is missing:",
        "",
        "```",
        f"{command} --only {parts}{limit} -o FOLDER",
        "```",
        "",
    ]


def _steps(part: Part, found: Found, by_kernels: dict[str, list[TrainingRecipe]]) -> Iterator[Gap]:
    keys = {cell.key for cell in found.cells}
    for kernels, recipes in by_kernels.items():
        lacking = [one for one in recipes if cell_key(one) not in keys and not is_beyond(one, found.cells)]
        if lacking:
            measured = sum(cell_key(recipe) in keys for recipe in recipes)
            missing = ", ".join(f"{recipe.batch} x {recipe.seq:,}" for recipe in lacking)
            yield part.name, kernels, f"{measured} of {len(recipes)}", missing


def _searches(part: Part, found: Found, by_kernels: dict[str, list[TrainingRecipe]]) -> Iterator[Gap]:
    """The borders of a part that searches for them, if the two sizes around a border are not adjacent."""
    if part.find_limit is None:
        return
    for kernels, recipes in by_kernels.items():
        largest, smallest = line_edges(found.cells, recipes[0], part.find_limit)
        if largest is None or smallest is None or smallest - largest > UNITS[part.find_limit]:
            above = "" if largest is None else f" above {largest:,}"
            below = "" if smallest is None else f" below {smallest:,}"
            yield part.name, kernels, "", f"border{above}{below}"
