"""Render `ligerprof estimate`: the peak, its terms, phases and roles, and the assumptions."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ligerprof.analyzers.estimate import Answer, FitVerdict, HostVerdict, MainMemory, MemoryEstimate, Moment
from ligerprof.analyzers.step_time.rates import Bound, StepTime
from ligerprof.gpus import find_gpu
from ligerprof.recipe.categories import Engine, Offload
from ligerprof.recipe.lengths import BatchShape
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.terminal import FiguresColumn, bold, listing_table, phases_table, roles_table, stacked
from ligerprof.roles import Role
from ligerprof.units import format_bytes, format_mib, in_one_unit

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    # takes numpy, which the calculator does without
    from ligerprof.runs.whole_run.replay import RunMoment, WholeRun

ESTIMATED = "estimated"


def _largest_bytes(estimate: MemoryEstimate) -> int:
    limit_bytes = 0 if estimate.gpu is None else estimate.gpu.limit_bytes
    return max(estimate.highest_peak_bytes, estimate.reserved_bytes, limit_bytes)


@in_one_unit(lambda _, estimate, *__: _largest_bytes(estimate))
def render_estimate(
    recipe: TrainingRecipe,
    estimate: MemoryEstimate,
    simulated: FiguresColumn | None = None,
    time: StepTime | str | None = None,
) -> "RenderableType":
    """Lay out an estimate, with errors against the simulated step and the predicted time if they are given."""
    columns = [
        FiguresColumn(title=ESTIMATED, roles=estimate.roles, phases=estimate.phases, peak_bytes=estimate.peak_bytes)
    ]
    if simulated is not None:
        columns.append(simulated)
    peak = summary(estimate)
    if recipe.compile:
        peak = f"Without torch.compile, {peak[0].lower()}{peak[1:]}"
    terms = [(term.name, term.formula, format_bytes(term.size_bytes)) for term in estimate.terms]
    return stacked(
        bold(recipe.summary),
        peak,
        listing_table("term", "formula", "size", right=("size",), folded=("formula",), rows=terms),
        phases_table(columns, reference=len(columns) - 1),
        roles_table(columns, reference=len(columns) - 1),
        *(f"assumed: {sentence}" for sentence in estimate.assumed),
        *(f"left out: {sentence}" for sentence in estimate.left_out),
        *(f"compared: {sentence}" for sentence in _compared(recipe, estimate)),
        *([] if time is None else time_lines(time)),
    )


def time_lines(time: StepTime | str) -> Iterator[str]:
    """The predicted time of a step and what bounds it, or why it is not known."""
    if isinstance(time, str):
        yield f"predicted time: none; {time}"
        return
    low, high = (1000 * seconds for seconds in time.interval)
    where = find_gpu(time.gpu).title + ("" if time.measured else ", by its data sheet")
    yield (
        f"predicted time: {1000 * time.seconds:,.1f} ms per step ({low:,.0f} to {high:,.0f}) on {where};"
        f" {time.tokens_per_second:,.0f} tokens/s, {100 * time.utilization:.0f} % of its peak rate"
    )
    parts = ", ".join(f"{part.part} {100 * part.seconds / time.parts_seconds:.0f} %" for part in time.parts)
    alone = f" (the GPU alone: {1000 * time.gpu_seconds:,.1f} ms)" if time.bound is Bound.LAUNCHES else ""
    yield f"bound by {time.bound}{alone}: {parts}"


def _compared(recipe: TrainingRecipe, estimate: MemoryEstimate) -> Iterator[str]:
    """How far the estimate was from measured steps of an engine for several GPUs."""
    if recipe.engine is Engine.TORCH or (found := estimate.compared) is None:
        return
    steps = "one measured step" if found.steps == 1 else f"{found.steps} measured steps"
    stage = f" at ZeRO stage {recipe.zero}" if recipe.engine is Engine.DEEPSPEED else ""
    moved = "" if recipe.offload is Offload.NONE else f" with --offload {recipe.offload}"
    yield (
        f"{steps} under {recipe.engine}{stage}{moved}: the estimate was within {100 * found.worst_error_ratio:.2f} %"
        f" (benchmarks/results/{found.source})"
    )


@in_one_unit(_largest_bytes)
def summary(estimate: MemoryEstimate) -> str:
    """The peak and its phase, the peaks of other steps, and whether the step fits."""
    text = (
        f"The peak is {format_bytes(estimate.peak_bytes)} in {estimate.peak_phase.value};"
        f" {format_bytes(estimate.first_step_peak_bytes)} in the first step"
    )
    if (second_bytes := estimate.second_step_peak_bytes) is not None:
        text += f", {format_bytes(second_bytes)} in the second one, where DDP builds its buckets anew"
    text += "."
    if estimate.evaluation_peak_bytes is not None:
        text += f" Evaluation needs {format_bytes(estimate.evaluation_peak_bytes)}."
    if estimate.host is not None:
        text += f" {_fit_host(estimate.host)}"
    elif estimate.host_bytes:
        text += f" Training uses {format_bytes(estimate.host_bytes)} of main memory."
    text += f" {main_memory_text(estimate.main_memory, estimate.recipe.gpus)}"
    return text if estimate.gpu is None else f"{text} {_fit(estimate, estimate.gpu)}"


def main_memory_text(memory: MainMemory, gpus: int) -> str:
    """What the processes of all GPUs need in main memory, and when."""
    who = f"the processes of {gpus} GPUs need" if gpus > 1 else "the process needs"
    moment, needed_bytes = memory.of_machine(gpus)
    files = f" Loading also maps {format_bytes(memory.file_bytes)} of files."
    return f"In main memory, {who} {format_bytes(needed_bytes)}, the most while {moment}.{files}"


def _fit_host(host: HostVerdict) -> str:
    needed, limit = format_bytes(host.needed_bytes), format_bytes(host.limit_bytes)
    verb = "fits" if host.fits else "DOES NOT FIT"
    return f"What it keeps in main memory {verb} in {limit} (--host-memory): {needed} for all GPUs."


def _fit(estimate: MemoryEstimate, verdict: FitVerdict) -> str:
    where = f" in the {verdict.decided_by}" if verdict.decided_by is not Moment.STEADY else ""
    freely = " without the limit" if estimate.reserved_bytes > verdict.limit_bytes else ""
    reserved = f"{format_bytes(estimate.reserved_bytes)} reserved{freely}"
    sizes = f"{format_bytes(verdict.allocated_bytes)} allocated{where}, {reserved}"
    limit = f"{format_bytes(verdict.limit_bytes)} ({verdict.limit_source})"
    text = f"It {answer_text(verdict.answer)} in {limit}: {sizes}."
    if verdict.answer is not Answer.MAY_NOT_FIT:
        return text
    return f"{text} `ligerprof step --device simulated` with --memory-limit settles it."


def answer_text(answer: Answer) -> str:
    """The judge's answer after a subject, in capitals unless it fits."""
    return str(answer) if answer is Answer.FITS else str(answer).upper()


# the columns of a layer's memory; other roles go to `other`
_LAYER_COLUMNS: Mapping[str, tuple[Role, ...]] = {
    "weights": (Role.PARAMETERS,),
    "gradients": (Role.GRADIENTS,),
    "states": (Role.OPTIMIZER_STATES,),
    "activations": (Role.CHECKPOINTS, Role.ACTIVATIONS, Role.ATTENTION_TEMPORARIES, Role.KERNEL_WORKSPACE),
}


def layers_table(estimate: MemoryEstimate) -> "Table":
    """The peak by part of the model in MiB; identical layers share a row with the figures of one."""
    rows = []
    for place in estimate.layers:
        held = [sum(place.roles[role] for role in roles) for roles in _LAYER_COLUMNS.values()]
        cells = (place.roles.total_bytes, *held, place.roles.total_bytes - sum(held))
        rows.append((place.name, *(format_mib(size // place.count) for size in cells)))
    columns = ("each, MiB", *_LAYER_COLUMNS, "other")
    return listing_table("at the peak", *columns, right=columns, rows=rows)


def run_lines(run: "WholeRun") -> Iterator[str]:
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


def _moment(moment: "RunMoment") -> str:
    return f"step {moment.step:,} ({_shape(moment.shape)})"


def _shape(shape: BatchShape) -> str:
    return f"{shape.rows} x {shape.tokens:,} tokens{', padded' if shape.masked else ''}"
