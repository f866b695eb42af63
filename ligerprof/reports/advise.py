"""Render `ligerprof advise`: the ladder with each rung's saving and cost, and the command to run next."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ligerprof.analyzers.search.advise import Advice
from ligerprof.recipe.configs.edits import FileEdit
from ligerprof.reports.fit import describe_verdict
from ligerprof.reports.listing import listing_table
from ligerprof.reports.shell_command import ShellCommand
from ligerprof.units import format_bytes, format_mib

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_MARKS = {"applied": "do", "spare": "spare", "useless": "no", "inapplicable": "-", "unpriced": "?"}
_LEGEND = (
    "do: part of the plan; spare: not needed, further saving; no: saves nothing; -: does not apply; ?: not estimated"
)


def render_advice(
    advice: Advice, next_command: str, edits: Sequence[FileEdit] = (), *, remarks: Sequence[str] = ()
) -> "RenderableType":
    """Lay out the ladder and its outcome, with the changed lines of configuration files if there are any.

    Args:
        remarks: on running the plan here, one sentence each.
    """
    from rich.console import Group
    from rich.text import Text

    return Group(
        Text(advice.recipe.summary, style="bold"),
        Text(f"The limit is {format_bytes(advice.limit.size_bytes)} of reserved bytes ({advice.limit.source})."),
        Text(f"Without changes it {describe_verdict(advice.verdict)}."),
        _ladder(advice),
        Text(_LEGEND),
        *(Text(line) for line in _outcome(advice)),
        *(Text(f"note: {sentence}") for sentence in (*advice.notes, *remarks)),
        *_edit_lines(edits),
        ShellCommand(f"Next: {next_command}"),
    )


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


def _ladder(advice: Advice) -> "Table":
    rows = [("unchanged", "", "", format_mib(advice.needed_bytes), "")]
    for step in advice.steps:
        sizes = (_mib(step.saved_bytes), _mib(step.needed_bytes))
        rows.append((step.change.title, _MARKS[step.state], *sizes, step.reason or step.change.cost))
    sizes, last = ("saves, MiB", "needs, MiB"), "cost or reason"
    return listing_table("change", "", *sizes, last, right=sizes, folded=(last,), rows=rows)


def _mib(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_mib(size_bytes)


def _outcome(advice: Advice) -> Iterator[str]:
    if not advice.applied:
        yield "Nothing needs to change." if advice.plan_verdict.fits else "Nothing on the ladder helps."
        return
    saved_bytes = sum(step.saved_bytes or 0 for step in advice.applied)
    saved = f"Together they save {format_bytes(saved_bytes)}. " if saved_bytes else ""
    margin = f", {format_bytes(advice.margin_bytes)} below the limit" if advice.plan_verdict.fits else ""
    yield f"{saved}With the plan it {describe_verdict(advice.plan_verdict)}{margin}."
    if advice.host_bytes:
        limit_bytes = advice.host_limit_bytes
        limit = "" if limit_bytes is None else f"; the limit for all GPUs is {format_bytes(limit_bytes)}"
        yield f"The plan uses {format_bytes(advice.host_bytes)} of main memory per GPU{limit}."
