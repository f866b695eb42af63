"""Render `ligerprof fit`: the largest batch and sequence, how they were checked, and the frontier."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ligerprof.analyzers.estimate import Moment
from ligerprof.analyzers.search.budget import Method, Verdict
from ligerprof.analyzers.search.fit import Bound, Fit, Point
from ligerprof.recipe.categories import Axis
from ligerprof.recipe.flags import command_line
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import Limit, find_limit
from ligerprof.reports.estimate import answer_text
from ligerprof.reports.terminal import ShellCommand, listing_table
from ligerprof.units import format_bytes, in_one_unit

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_ENDS = {Bound.POSITIONS: ", the model's maximum", Bound.SEQUENCES: ", all sequences of the file"}


@in_one_unit(lambda fit, **_: fit.limit.size_bytes)
def render_fit(fit: Fit, *, answered: bool = False) -> "RenderableType":
    """Lay out the answers: the limit, the wanted pair, the largest batch and sequence, the frontier, the settings.

    Args:
        answered: whether the lines up to the answers are printed already.
    """
    from rich.console import Group
    from rich.text import Text

    return Group(
        *([] if answered else [heading(fit.recipe, fit.limit), *(Text(line) for line in _answers(fit))]),
        *([_frontier_table(fit)] if fit.frontier else []),
        *_settings(fit),
        *_nearest(fit),
        *(Text(f"note: {sentence}") for sentence in fit.notes),
    )


@in_one_unit(lambda _, limit: limit.size_bytes)
def heading(recipe: TrainingRecipe, limit: Limit) -> "RenderableType":
    """The recipe and the limit."""
    from rich.console import Group
    from rich.text import Text

    return Group(
        Text(recipe.summary, style="bold"),
        Text(f"The limit is {format_bytes(limit.size_bytes)} of reserved bytes ({limit.source})."),
    )


def describe_verdict(verdict: Verdict) -> str:
    """Whether a recipe fits, the bytes it holds, and the method that determined this."""
    held, moment = format_bytes(verdict.held_bytes), _moment(verdict)
    if not verdict.fits_host:
        return "DOES NOT FIT main memory (--host-memory)"
    if verdict.answer is None:
        return f"has no verdict; counted as SFT, it needs {held} {verdict.held}{moment} ({verdict.method})"
    answer = answer_text(verdict.answer)
    if verdict.checked is Method.SIMULATED and not verdict.fits:
        return f"{answer}: out of memory{moment} (simulated)"
    return f"{answer}: {held} {verdict.held}{moment} ({verdict.method})"


def _moment(verdict: Verdict) -> str:
    """Where memory is highest, or ran out; the steady step is not named."""
    if verdict.run_step is not None:
        return f" in step {verdict.run_step:,} of the run"
    if verdict.decided_by is None or verdict.decided_by is Moment.STEADY:
        return ""
    return f" in the {verdict.decided_by}"


def _answers(fit: Fit) -> Iterator[str]:
    yield answer_line(fit.recipe, "wanted", fit.wanted)
    yield answer_line(fit.recipe, "batch", fit.batch)
    if fit.recipe.lengths is None:
        yield answer_line(fit.recipe, "seq", fit.seq)


@in_one_unit(lambda recipe, *_: find_limit(recipe).size_bytes)
def answer_line(recipe: TrainingRecipe, name: str, answer: Verdict | Point | None) -> str:
    """One of the three answers: `wanted`, `batch` or `seq`."""
    if isinstance(answer, Verdict):
        return f"{recipe.batch} x {recipe.seq} tokens {describe_verdict(answer)}."
    asked = {
        "batch": f"Largest batch at {recipe.seq} tokens",
        "seq": f"Longest sequence at batch {recipe.batch}",
    }
    return f"{asked[name]}: {_answer(answer)}"


def _answer(point: Point | None) -> str:
    if point is None:
        return "none"
    figure = point.batch if point.axis is Axis.BATCH else point.seq
    end = _ENDS.get(point.bounded_by, "")
    verdict = point.verdict
    text = f"{figure}{end} ({format_bytes(verdict.held_bytes)} {verdict.held}{_moment(verdict)}, {verdict.method})"
    if not point.fragmented:
        return text
    verb = "fails" if len(point.fragmented) == 1 else "fail"
    return f"{text}; {', '.join(map(str, point.fragmented))} {verb} through fragmentation"


def _frontier_table(fit: Fit) -> "Table":
    figures = ("sequence", "largest batch", "tokens", "held")
    rows = [
        (
            f"{point.seq:,}",
            f"{point.batch:,}",
            f"{point.tokens:,}",
            format_bytes(point.verdict.held_bytes),
            point.verdict.method,
        )
        for point in fit.frontier
    ]
    return listing_table(*figures, "method", right=figures, rows=rows)


def _settings(fit: Fit) -> Iterator["RenderableType"]:
    from rich.text import Text

    wanted = f"{fit.recipe.batch} x {fit.recipe.seq} tokens"
    if fit.settings_gap is not None:
        yield Text(f"No settings for {wanted}: {fit.settings_gap}")
    if fit.settings is None:
        return
    if not fit.settings.plan_verdict.fits:
        yield Text(f"No settings make {wanted} fit; `ligerprof advise` shows the closest.")
        return
    titles = ", ".join(step.change.title for step in fit.settings.applied)
    yield Text(f"The cheapest settings for {wanted}: {titles}.")
    yield Text(f"With them it {describe_verdict(fit.settings.plan_verdict)}.")
    yield ShellCommand(f"  {command_line('estimate', fit.settings.plan)}")


def _nearest(fit: Fit) -> Iterator["RenderableType"]:
    from rich.text import Text

    if fit.nearest:
        yield Text("Each of these alone makes a batch fit:")
    for each in fit.nearest:
        yield Text(f"  {each.change.title}: largest batch {_answer(each.point)}; {each.change.cost}")
