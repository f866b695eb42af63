"""Render suggestions: what each saves and costs, then the lines to change."""

from collections.abc import Iterator, Sequence

from ligerprof.analyzers.suggestions.suggestion import Basis, Suggestion
from ligerprof.units import format_bytes, format_like

_MOST = 8


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


def _effect(suggestion: Suggestion) -> str:
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
