"""Render `explain`, `diff` and `estimate` as Markdown, for the comment of a pull request."""

import re
from collections.abc import Iterable, Iterator, Sequence

from ligerprof.analyzers.estimate import MemoryEstimate
from ligerprof.analyzers.explain.groups import BlockGroup, join_layers
from ligerprof.analyzers.explain.peak import PeakDiff, PeakReport
from ligerprof.reports.diff import change_cells, change_rows, difference_sentence, group_rows, signed_mib, total_rows
from ligerprof.reports.estimate import summary
from ligerprof.reports.peak import failure_lines, finding_lines, phase_lines, sentence
from ligerprof.reports.terminal import percent_share
from ligerprof.roles import MemoryBreakdown, Role
from ligerprof.units import format_mib

# characters that Markdown or HTML obeys
_OBEYED = re.compile(r"([\\`*_\[\]<>|~&@]|^[-+#])")


def peak_markdown(report: PeakReport, *, top: int = 10) -> str:
    """The failure if memory ran out, else the peak: sentences, a table of roles, and one of the largest blocks."""
    peak = [sentence(report), *phase_lines(report), *finding_lines(report)]
    notes = [f"Note: {note}." for note in report.notes]
    oom = report.out_of_memory
    if oom is None:
        tables = _roles(report.roles, "at the peak"), _blocks(report.blocks, top)
        return _document(_paragraphs(peak), *tables, _paragraphs(notes))
    tables = _roles(oom.roles, "at the failure"), _blocks(oom.blocks, top)
    return _document(_paragraphs(failure_lines(oom)), *tables, _paragraphs([*peak, *notes]))


def diff_markdown(diff: PeakDiff, *, top: int = 10) -> str:
    """The change of the peak: a sentence, a table of roles and totals, and one of the groups that changed most."""
    rows = (change_cells(*row) for row in (*change_rows(diff), *total_rows(diff)))
    groups = [[row.role, signed_mib(row.change_bytes), row.counts, row.who] for row in group_rows(diff)[:top]]
    return _document(
        _paragraphs([difference_sentence(diff)]),
        _table(["role", "before, MiB", "after, MiB", "change, MiB"], rows),
        _table(["role", "change, MiB", "blocks", "allocated by"], groups) if groups else [],
        _paragraphs(f"Note: {note}." for note in diff.notes),
    )


def estimate_markdown(estimate: MemoryEstimate) -> str:
    """The estimated peak and whether it fits, a table of roles, and one of the terms that explain them."""
    terms = [[term.name, term.formula, format_mib(term.size_bytes)] for term in estimate.terms]
    notes = [f"assumed: {each}" for each in estimate.assumed] + [f"left out: {each}" for each in estimate.left_out]
    return _document(
        _paragraphs([f"Estimated: {estimate.recipe.summary}", summary(estimate)]),
        _roles(estimate.roles, "at the peak"),
        _table(["term", "formula", "MiB"], terms),
        _paragraphs(notes),
    )


def _roles(roles: MemoryBreakdown, title: str) -> Iterator[str]:
    sizes = [(role.value, roles[role]) for role in Role if roles[role]]
    total_bytes = roles.total_bytes
    sizes.append(("total", total_bytes))
    rows = ([name, format_mib(size_bytes), percent_share(size_bytes, total_bytes)] for name, size_bytes in sizes)
    return _table(["role", f"{title}, MiB", "share"], rows)


def _blocks(groups: Iterable[BlockGroup], top: int) -> Iterator[str]:
    rows = join_layers(groups)
    cells = (
        [
            row.role.value,
            format_mib(row.size_bytes),
            str(row.count),
            " ".join(filter(None, (row.module, row.frame))),
            row.kept_by,
        ]
        for row in rows[:top]
    )
    return _table(["role", "MiB", "blocks", "allocated by", "kept by"], cells)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table; columns with figures are aligned to the right."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'|'.join('---:' if _has_figures(head) else '---' for head in heads)}|"
    for row in rows:
        yield f"| {' | '.join(map(_escaped, row))} |"


def _has_figures(head: str) -> bool:
    return head.endswith("MiB") or head in ("share", "blocks")


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    yield from (f"{_escaped(line)}  " for line in lines)


def _document(*parts: Iterable[str]) -> str:
    """The parts with an empty line between them."""
    texts = ("\n".join(part).rstrip() for part in parts)
    return "\n\n".join(text for text in texts if text)


def _escaped(text: str) -> str:
    """Text without any effect in Markdown or HTML, in one line."""
    one_line = " ".join(text.split())
    return _OBEYED.sub(r"\\\1", one_line)
