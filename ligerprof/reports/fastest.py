"""Render `ligerprof fit --fastest`: recipes that fit, by predicted tokens per second, and why the next one does not."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ligerprof.analyzers.search.fastest import Candidate, Fastest
from ligerprof.recipe.flags import command_line
from ligerprof.reports.estimate import time_lines
from ligerprof.reports.fit import describe_verdict, heading
from ligerprof.reports.terminal import ShellCommand, listing_table
from ligerprof.units import format_bytes, in_one_unit

if TYPE_CHECKING:
    from rich.console import RenderableType

_FIGURES = ("tokens/s", "ms per step", "held")


@in_one_unit(lambda found: found.limit.size_bytes)
def render_fastest(found: Fastest) -> "RenderableType":
    """Lay out the recipes that fit, the next faster one, and what was not tried."""
    from rich.console import Group
    from rich.text import Text

    rows = [
        (
            f"{each.time.tokens_per_second:,.0f}",
            f"{1000 * each.time.seconds:,.1f}",
            format_bytes(each.verdict.held_bytes),
            each.verdict.method,
            each.time.bound.value,
            changes_text(found, each),
        )
        for each in found.found
    ]
    table = listing_table(*_FIGURES, "method", "bound by", "recipe", right=_FIGURES, folded=("recipe",), rows=rows)
    return Group(
        heading(found.recipe, found.limit),
        *([table] if rows else []),
        *map(Text, _remarks(found)),
        *([ShellCommand(f"Next: {command_line('step', found.found[0].recipe)}")] if rows else []),
    )


def candidate_line(candidate: Candidate) -> str:
    """A recipe that fits and is faster than those before."""
    time = candidate.time
    return f"{time.tokens_per_second:,.0f} tokens/s (predicted): {candidate.recipe.summary}"


def changes_text(found: Fastest, candidate: Candidate) -> str:
    """What a recipe trains at a time, and how."""
    recipe = candidate.recipe
    words = recipe.summary.removeprefix(found.recipe.spec.name).lstrip(", ")
    accumulated = f" x {recipe.grad_accum} micro-batches" if recipe.grad_accum > 1 else ""
    conf = f", {recipe.alloc_conf}" if recipe.alloc_conf and recipe.alloc_conf != found.recipe.alloc_conf else ""
    size, _, rest = words.partition(", ")
    return f"{size}{accumulated}, {rest}{conf}"


def _remarks(found: Fastest) -> Iterator[str]:
    if (given := found.given) is not None:
        yield f"As given: {given.time.tokens_per_second:,.0f} tokens/s; it {describe_verdict(given.verdict)}."
    if found.found:
        yield from time_lines(found.found[0].time)
    if (large := found.too_large) is not None:
        speed = f"{large.time.tokens_per_second:,.0f} tokens/s"
        yield f"Faster, with {speed}: {changes_text(found, large)}; it {describe_verdict(large.verdict)}."
    yield f"{found.tried} recipes have a predicted time."
    for reason in found.left_out:
        yield f"not tried: {reason}"
