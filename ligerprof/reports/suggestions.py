"""Render suggestions: what each saves and costs, then the lines to change."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING

from ligerprof.analyzers.suggestions.suggestion import Basis, Suggestion
from ligerprof.units import format_bytes, format_like

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_MOST = 8
# spaces before a line to copy
_COPIED = 4


def suggestion_lines(suggestions: Sequence[Suggestion]) -> Iterator[str]:
    """Lines of text, the cheapest suggestion first; none without suggestions."""
    if not suggestions:
        return
    failed = any(suggestion.lets_pass is not None for suggestion in suggestions)
    yield "What would have let it pass, the cheapest first:" if failed else "What lowers the peak, the cheapest first:"
    for suggestion in suggestions[:_MOST]:
        yield f"- {suggestion.change}"
        yield f"  {_effect(suggestion)}. Cost: {suggestion.cost.value}; {suggestion.cost_reason}."
        if suggestion.condition:
            yield f"  {suggestion.condition}."
        yield from (f"    {line}" for line in suggestion.how)


def suggestion_block(suggestions: Sequence[Suggestion]) -> "RenderableType":
    """The same lines for the terminal: prose is wrapped below its start, and lines to copy are not wrapped."""
    from rich.console import Group

    return Group(*map(indented, suggestion_lines(suggestions)))


def indented(line: str) -> "RenderableType":
    """A line of prose, wrapped with its indent; one of a file or a program, after four spaces, as it is."""
    from rich.text import Text

    indent = len(line) - len(line.lstrip(" "))
    if indent >= _COPIED:
        return Text(line, no_wrap=True, overflow="ignore")
    return _Prose(line, indent) if indent else Text(line)


@dataclass(frozen=True, slots=True)
class _Prose:
    """A line of words that stays below its start where it is wrapped."""

    line: str
    indent: int

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """The wrapped lines."""
        from rich.text import Text

        following = " " * self.indent
        lines = wrap(self.line, options.max_width, subsequent_indent=following, break_on_hyphens=False)
        yield Text("\n".join(lines), no_wrap=True, overflow="ignore")


def _effect(suggestion: Suggestion) -> str:
    if suggestion.saves_reserved_bytes is not None and suggestion.new_reserved_bytes is not None:
        reserved = format_bytes(suggestion.new_reserved_bytes)
        if suggestion.lets_pass:
            return f"reserves {reserved} with the request, enough"
        return (
            f"reserves {reserved}, {format_like(suggestion.saves_reserved_bytes, suggestion.new_reserved_bytes)} less"
        )
    if suggestion.saves_bytes is None or suggestion.new_peak_bytes is None:
        return "saving not computed"
    verdict = {True: ", enough", False: ", not enough alone", None: ""}[suggestion.lets_pass]
    peak = format_bytes(suggestion.new_peak_bytes)
    saves = format_like(suggestion.saves_bytes, suggestion.new_peak_bytes)
    saves, peak = {
        Basis.REPLAYED: (saves, peak),
        Basis.AT_LEAST: (f"at least {saves}", f"at most {peak}"),
        Basis.ESTIMATED: (f"about {saves} (estimated)", f"about {peak}"),
    }[suggestion.basis]
    return f"saves {saves}, new peak {peak}{verdict}"
