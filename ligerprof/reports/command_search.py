"""Render `fit -- COMMAND` and `advise -- COMMAND`: trials as they end, the answer, and the command that fits."""

from collections.abc import Iterator

from rich.console import RenderableType

from ligerprof.recipe.commands.changes import ChangedCommand
from ligerprof.reports.terminal import ShellCommand, listing_table, stacked
from ligerprof.runs.command_search.fastest import FastestCommand, FittingSplits
from ligerprof.runs.command_search.session import Bound, CheapestFit, CommandProblem, LargestFit, named
from ligerprof.runs.command_search.trials import Outcome, Trial
from ligerprof.units import format_bytes


def trial_line(name: str, trial: Trial) -> str:
    """How a trial ended."""
    seconds = f"{trial.seconds:.0f} s"
    if trial.outcome is Outcome.FAILED:
        return f"  {name}: fails, {trial.reason} ({seconds})"
    if trial.outcome is Outcome.OUT_OF_MEMORY:
        when = f" in step {trial.steps}" if trial.steps else ""
        return f"  {name}: out of memory{when} ({seconds})"
    if trial.limit_bytes is None:
        return f"  {name}: needs {format_bytes(trial.peak_bytes)} allocated, without a limit ({seconds})"
    held = f"{format_bytes(trial.reserved_bytes)} reserved, {format_bytes(trial.peak_bytes)} allocated"
    speed = "" if trial.step_seconds is None else f", {1000 * trial.step_seconds:,.1f} ms per step (predicted)"
    return f"  {name}: fits, {held}{speed} ({seconds})"


def render_largest(found: LargestFit) -> RenderableType:
    """The largest value, what bounds it, and the command."""
    return stacked(*_largest_lines(found), *_fitting(found.problem, found.change, found.trial))


def _largest_lines(found: LargestFit) -> Iterator[str]:
    if found.own is not None and found.own_fits is not None:
        yield f"{found.key} {found.own}, as the command has it, {'fits' if found.own_fits else 'DOES NOT FIT'}."
    if found.value is None:
        smallest = "" if found.next_value is None else f" {found.next_value} does not."
        yield f"No {found.key} is known to fit;{smallest}" if not found.is_whole else f"No {found.key} fits."
        return
    ends = {
        None: "the largest that is known to fit; the search was interrupted",
        Bound.MEMORY: f"{found.next_value} does not fit",
        Bound.VALUES: "the last of the given values",
        Bound.PROGRAM: "much larger values need no more memory, as if the program had no more data"
        if found.next_value is None
        else f"with {found.next_value}, the program fails",
    }
    yield f"Largest {found.key}: {found.value} ({ends[found.bounded_by]})."


def render_cheapest(found: CheapestFit, *, show_all: bool) -> RenderableType:
    """The plan, what else there is, and the command."""
    parts: list[RenderableType] = []
    if found.own is not None:
        verdict = "fits" if found.own.outcome is Outcome.RAN else "DOES NOT FIT"
        parts.append(f"Without changes it {verdict}.")
    if found.plan:
        parts.append(listing_table("the plan", "cost", rows=[(lever.name, lever.cost) for lever in found.plan]))
        parts.append("Each change is needed." if found.is_whole else "The search was interrupted.")
    elif found.plan is not None:
        parts.append("Nothing needs to change.")
    else:
        parts.append("No change that is known to help makes it fit." if found.is_whole else "Interrupted.")
    if show_all and found.left:
        parts.append(listing_table("not needed", "cost", rows=[(lever.name, lever.cost) for lever in found.left]))
    parts += [f"note: {lever.name} cannot be tried: {reason}" for lever, reason in found.refused]
    return stacked(*parts, *_fitting(found.problem, found.change, found.trial))


def render_fastest_command(found: FastestCommand) -> RenderableType:
    """The alternatives that fit, the fastest first, and the command."""
    columns = ("ms per step", "reserved")
    rows = [
        (
            f"{1000 * (trial.step_seconds or 0.0):,.1f}",
            format_bytes(trial.reserved_bytes),
            str(trial.time_bound),
            named(change),
        )
        for change, trial in found.fitting
    ]
    table = listing_table(*columns, "bound by", "changes", right=columns, folded=("changes",), rows=rows)
    end = [] if found.is_whole else ["The search was interrupted."]
    predicted = ["Times are predicted, for steps of as many sequences."] if rows else []
    return stacked(*([table] if rows else []), *predicted, *end, *_fitting(found.problem, found.change, found.trial))


def render_splits(found: FittingSplits) -> RenderableType:
    """The splits with their ranks, the worst first, and the command of the one with the fewest ranks for a model."""
    verdicts = {Outcome.RAN: "fits", Outcome.OUT_OF_MEMORY: "DOES NOT FIT", Outcome.FAILED: "fails"}
    rows = [(split.name, verdicts[trial.outcome], _ranks(trial)) for split, trial in found.trials]
    columns = (f"{found.problem.machine.world} GPUs as", "", "reserved by rank, the worst first")
    end = [] if found.is_whole else ["The search was interrupted."]
    launch, world = found.problem.command.launch, found.problem.machine.world
    if launch is not None and launch.launcher != "python" and launch.processes not in (None, world):
        end.append(f"note: the command launches {launch.processes} ranks; have it launch {world}")
    table = listing_table(*columns, folded=columns[2:], rows=rows)
    return stacked(*([table] if rows else []), *end, *_fitting(found.problem, found.change, found.trial))


def _ranks(trial: Trial) -> str:
    if trial.outcome is Outcome.FAILED:
        return trial.reason
    if trial.outcome is Outcome.OUT_OF_MEMORY:
        return ", ".join(f"{each.rank}: out of memory" for each in trial.ranks)
    return ", ".join(f"{each.rank}: {format_bytes(each.reserved_bytes)}" for each in trial.ranks)


def _fitting(problem: CommandProblem, change: object, trial: Trial | None) -> Iterator[RenderableType]:
    if trial is None:
        return
    changed: ChangedCommand = problem.changed(change)  # type: ignore[arg-type]
    if problem.machine.gpu.eager:
        yield "note: functions of torch.compile ran without it; compiled, they need less memory as far as is known"
    yield f"It holds {format_bytes(trial.reserved_bytes)} reserved, {format_bytes(trial.peak_bytes)} allocated:"
    yield ShellCommand(f"  {changed.text}")
    if changed.files and problem.copies is None:
        names = ", ".join(map(str, changed.files))
        yield f"The changed keys go into {names}: -o FILE writes it."
