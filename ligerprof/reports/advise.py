"""Render `ligerprof advise`: the ladder with each rung's saving and cost, and the command to run next."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ligerprof.analyzers.search.advise import Advice, State, Step
from ligerprof.recipe.configs.edits import FileEdit
from ligerprof.reports.fit import describe_verdict
from ligerprof.reports.terminal import ShellCommand, listing_table
from ligerprof.units import format_bytes, format_mib, in_one_unit

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_SIZES = ("saves, MiB", "needs, MiB")
_MARKS = {"spare": "spare", "useless": "no", "inapplicable": "-", "unpriced": "?"}
_LEGEND = "spare: not needed, further saving; no: saves nothing; -: does not apply; ?: not estimated"


@in_one_unit(lambda advice, *_, **__: max(advice.limit.size_bytes, advice.needed_bytes))
def render_advice(
    advice: Advice,
    next_command: str,
    edits: Sequence[FileEdit] = (),
    *,
    remarks: Sequence[str] = (),
    show_all: bool = False,
) -> "RenderableType":
    """Lay out the plan with its outcome and the changed lines of configuration files, then the other changes.

    Args:
        remarks: on running the plan here, one sentence each.
        show_all: whether to list the changes that do not apply, too, with their reasons.
    """
    from rich.console import Group
    from rich.text import Text

    others = [step for step in advice.steps if step.state is not State.APPLIED]
    hidden = [] if show_all else [step for step in others if step.state is State.INAPPLICABLE]
    shown = [step for step in others if step not in hidden]
    return Group(
        Text(advice.recipe.summary, style="bold"),
        Text(f"The limit is {format_bytes(advice.limit.size_bytes)} of reserved bytes ({advice.limit.source})."),
        Text(f"Without changes it {describe_verdict(advice.verdict)}."),
        *((_plan_table(advice),) if advice.applied else ()),
        *(Text(line) for line in _outcome(advice)),
        *(Text(f"note: {sentence}") for sentence in (*advice.notes, *remarks)),
        *_edit_lines(edits),
        ShellCommand(f"Next: {next_command}"),
        *((_others_table(shown), Text(_LEGEND)) if shown else ()),
        *([Text(_hidden_line(hidden))] if hidden else []),
    )


def _hidden_line(hidden: Sequence[Step]) -> str:
    titles = ", ".join(step.change.title for step in hidden)
    return f"{titles} {'does' if len(hidden) == 1 else 'do'} not apply; --all says why."


def _edit_lines(edits: Sequence[FileEdit]) -> "Iterator[RenderableType]":
    from rich.text import Text

    for edit in edits:
        if edit.changes:
            yield Text(f"In {edit.file}:")
        for line in edit.lines:
            # those of a file are copied, so not wrapped
            yield Text(line, no_wrap=True, overflow="ignore") if line[:1] in "+-" else Text(line)
    if edits and edits[0].not_in_file:
        having = "No file has a key" if len(edits) > 1 else "The file has no key"
        yield Text(f"{having} for {', '.join(edits[0].not_in_file)}.")


def _plan_table(advice: Advice) -> "Table":
    rows = [("unchanged", "", format_mib(advice.needed_bytes), "")]
    rows += [(step.change.title, *_sizes(step), _cost(step)) for step in advice.applied]
    return listing_table("the plan", *_SIZES, "cost", right=_SIZES, folded=("cost",), rows=rows)


def _others_table(steps: Sequence[Step]) -> "Table":
    last = "cost or reason"
    rows = [(step.change.title, _MARKS[step.state], *_sizes(step), step.reason or _cost(step)) for step in steps]
    return listing_table("other changes", "", *_SIZES, last, right=_SIZES, folded=(last,), rows=rows)


def _cost(step: Step) -> str:
    """The cost in words, with the predicted change of the time per token."""
    if step.time_ratio is None:
        return step.change.cost
    return f"{step.change.cost}; predicted time per token {100 * (step.time_ratio - 1):+.0f} %"


def _sizes(step: Step) -> tuple[str, str]:
    return _mib(step.saved_bytes), _mib(step.needed_bytes)


def _mib(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_mib(size_bytes)


def _outcome(advice: Advice) -> Iterator[str]:
    if not advice.applied:
        yield "Nothing needs to change." if advice.plan_verdict.fits else "Nothing on the ladder helps."
        return
    saved_bytes = sum(step.saved_bytes or 0 for step in advice.applied)
    saved = f"{'It saves' if len(advice.applied) == 1 else 'Together they save'} {format_bytes(saved_bytes)}. "
    saved = saved if saved_bytes else ""
    margin = f", {format_bytes(advice.margin_bytes)} below the limit" if advice.plan_verdict.fits else ""
    yield f"{saved}With the plan it {describe_verdict(advice.plan_verdict)}{margin}."
    if advice.host_bytes:
        limit_bytes = advice.host_limit_bytes
        limit = "" if limit_bytes is None else f"; the limit for all GPUs is {format_bytes(limit_bytes)}"
        yield f"The plan uses {format_bytes(advice.host_bytes)} of main memory per GPU{limit}."
