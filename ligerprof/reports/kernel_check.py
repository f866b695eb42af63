"""Render `ligerprof kernels check`: a row per case, with the error next to its bound."""

from typing import TYPE_CHECKING, Any

from ligerprof.reports.terminal import listing_table
from ligerprof.runs.kernel_check.check import CheckRow, KernelCheck, Result
from ligerprof.serialization import document, select, to_json

if TYPE_CHECKING:
    from rich.console import RenderableType

_REMARK = "largest, or why"


def kernel_check_json(check: KernelCheck) -> dict[str, Any]:
    """The object of `ligerprof kernels check --json`; an error beyond all numbers is null, with a note."""
    rows = [{**to_json(row), "error": _number(row)} for row in check.rows]
    return document("kernel_check", select(check, "kernel", "provider", "slot", "device", "passed"), {"rows": rows})


def _number(row: CheckRow) -> float | None:
    return None if row.error == float("inf") else row.error


def render_kernel_check(check: KernelCheck) -> "RenderableType":
    """Lay out the rows, and count them."""
    from rich.console import Group
    from rich.text import Text

    rows = [
        (
            row.result.upper(),
            row.check,
            f"{row.case}: {row.tensor.replace('_', ' ')}" if row.check == "bytes" and row.tensor else row.case,
            "" if row.error is None else f"{row.error:.1e}",
            "" if row.bound is None else f"{row.bound:.1e}",
            row.note or row.tensor,
        )
        for row in check.rows
    ]
    counts = {result: sum(row.result is result for row in check.rows) for result in Result}
    summary = ", ".join(f"{count} {result}" for result, count in counts.items() if count)
    title = f"kernel {check.kernel} of {check.provider} ({check.device}): {summary}"
    return Group(
        Text(title),
        listing_table("result", "check", "case", "error", "bound", _REMARK, folded=("case", _REMARK), rows=rows),
    )
