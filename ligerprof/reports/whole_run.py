"""Render a simulated run over a file of lengths: its peaks, where they come from, and fragmentation."""

from collections.abc import Iterator

from ligerprof.recipe.lengths import BatchShape
from ligerprof.runs.whole_run.replay import RunMoment, WholeRun
from ligerprof.units import format_bytes


def run_lines(run: WholeRun) -> Iterator[str]:
    """The run in a few lines."""
    shapes = run.shapes
    cut = f", {shapes.cut:,} of them cut to --seq" if shapes.cut else ""
    padding = f", {100 * run.padding_share:.1f} % padding" if run.padding_share > 0 else ""
    steps = f"{run.steps:,} of {len(shapes.steps):,} steps"
    yield f"Simulated run: {steps} over {shapes.sequences:,} sequences{cut}{padding}."
    yield f"allocated: at most {format_bytes(run.peak_bytes)} in {_moment(run.peak)}"
    yield (
        f"reserved: at most {format_bytes(run.reserved_bytes)}, first in {_moment(run.reserved)};"
        f" {format_bytes(run.fragmentation_bytes)} more than was ever allocated"
    )
    if (oom := run.oom) is not None:
        yield (
            f"OUT OF MEMORY in {_moment(oom.moment)}: {format_bytes(oom.requested_bytes)} requested with"
            f" {format_bytes(oom.allocated_bytes)} allocated and {format_bytes(oom.reserved_bytes)} reserved under a"
            f" limit of {format_bytes(oom.limit_bytes)}"
        )
    yield f"note: {run.distinct_shapes:,} shapes of micro-batches; {run.traced_shapes:,} simulated, the others follow."
    if run.bounded_bytes:
        yield f"note: temporaries of up to {format_bytes(run.bounded_bytes)} count with an upper bound."


def _moment(moment: RunMoment) -> str:
    return f"step {moment.step:,} ({_shape(moment.shape)})"


def _shape(shape: BatchShape) -> str:
    return f"{shape.rows} x {shape.tokens:,} tokens{', padded' if shape.masked else ''}"
