"""Render `ligerprof fit` and `advise`: what fits, by size or speed, and the ladder of changes with their savings."""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ligerprof.analyzers.estimate import Moment
from ligerprof.analyzers.search.budget import Method, Verdict
from ligerprof.analyzers.search.changes import Advice, State, Step
from ligerprof.analyzers.search.fastest import Candidate, Fastest, Plan
from ligerprof.analyzers.search.fit import Bound, Fit, Point
from ligerprof.recipe.categories import Axis
from ligerprof.recipe.configs.edits import FileEdit, keys_for
from ligerprof.recipe.flags import command_line
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import Limit, find_limit
from ligerprof.reports.estimate import answer_text, main_memory_text, time_lines
from ligerprof.reports.terminal import ShellCommand, bold, listing_table, stacked
from ligerprof.units import format_bytes, format_mib, in_one_unit

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
    return stacked(
        *([] if answered else [heading(fit.recipe.summary, fit.limit), *_answers(fit)]),
        *([_frontier_table(fit)] if fit.frontier else []),
        *_settings(fit),
        *_nearest(fit),
        *([] if fit.main_memory is None else [main_memory_text(fit.main_memory, fit.recipe.gpus)]),
        *(f"note: {sentence}" for sentence in fit.notes),
    )


@in_one_unit(lambda _, limit: limit.size_bytes)
def heading(title: str, limit: Limit) -> "RenderableType":
    """What is searched, and the limit."""
    return stacked(bold(title), f"The limit is {format_bytes(limit.size_bytes)} of reserved bytes ({limit.source}).")


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
    asked = {"batch": f"Largest batch at {recipe.seq} tokens", "seq": f"Longest sequence at batch {recipe.batch}"}
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


def _settings(fit: Fit) -> "Iterator[RenderableType]":
    wanted = f"{fit.recipe.batch} x {fit.recipe.seq} tokens"
    if fit.settings_gap is not None:
        yield f"No settings for {wanted}: {fit.settings_gap}"
    if fit.settings is None:
        return
    if not fit.settings.plan_verdict.fits:
        yield f"No settings make {wanted} fit; `ligerprof advise` shows the closest."
        return
    titles = ", ".join(step.change.title for step in fit.settings.applied)
    yield f"The cheapest settings for {wanted}: {titles}."
    yield f"With them it {describe_verdict(fit.settings.plan_verdict)}."
    yield ShellCommand(f"  {command_line('estimate', fit.settings.plan)}")


def _nearest(fit: Fit) -> "Iterator[RenderableType]":
    if fit.nearest:
        yield "Each of these alone makes a batch fit:"
    for each in fit.nearest:
        yield f"  {each.change.title}: largest batch {_answer(each.point)}; {each.change.cost}"


_FIGURES = ("tokens/s", "ms per step", "held")


@in_one_unit(lambda found: found.limit.size_bytes)
def render_fastest(found: Fastest) -> "RenderableType":
    """Lay out the recipes that fit, the next faster one, and what was not tried."""
    rows = [
        (
            f"{each.time.tokens_per_second:,.0f}",
            f"{1000 * each.time.seconds:,.1f}",
            format_bytes(each.verdict.held_bytes),
            each.verdict.method,
            each.time.bound.value,
            changes_text(found, each),
        )
        for each in found.found
    ]
    table = listing_table(*_FIGURES, "method", "bound by", "recipe", right=_FIGURES, folded=("recipe",), rows=rows)
    return stacked(
        heading(found.recipe.summary, found.limit),
        *([table] if rows else []),
        *_remarks(found),
        *([ShellCommand(f"Next: {command_line('step', found.found[0].recipe)}")] if rows else []),
    )


# frameworks whose keys are printed, by the names of their tables
_FRAMEWORKS = {"transformers": "transformers", "trl-sft": "TRL", "axolotl": "axolotl", "torchtitan": "torchtitan"}


@in_one_unit(lambda found: found.limit.size_bytes)
def render_plan(found: Plan) -> "RenderableType":
    """Lay out the plan, its time next to that of others, and how to apply it."""
    first = 0
    rows = []
    for count, name in found.layers:
        rows.append((f"{first} to {first + count - 1}" if count > 1 else str(first), name))
        first += count
    recipe = found.recipe
    host = f"The inputs of checkpointed layers move to {format_bytes(found.host_bytes)} of page-locked main memory."
    moved = [host] if recipe.activation_offload else []
    return stacked(
        heading(found.given.summary, found.limit),
        listing_table("layers", "keep", folded=("keep",), rows=rows),
        *moved,
        f"It {describe_verdict(found.chosen.verdict)}{_conf_words(found.given, recipe)}.",
        *(
            []
            if found.keeps_cache
            else ["note: each step gives cached memory back to make room, which takes time that is not predicted"]
        ),
        *time_lines(found.chosen.time),
        *_by_keys(found),
        f"{found.tried} of {found.possible} plans were estimated.",
        *(f"not tried: {reason}" for reason in found.left_out),
        "In your own loop, before the first step:",
        *_apply_lines(found.selection),
        ShellCommand(f"Next: {command_line('step', recipe)}"),
    )


def _apply_lines(selection: str) -> Iterator[str]:
    """The call that sets a plan on a model, a run of layers per line."""
    *runs, last = selection.split(",")
    yield "  ligerprof.checkpoint("
    yield "      model,"
    yield from (f'      "{run},"' for run in runs)
    yield f'      "{last}",'
    yield "  )"


def _conf_words(given: TrainingRecipe, recipe: TrainingRecipe) -> str:
    changed = recipe.alloc_conf is not None and recipe.alloc_conf != given.alloc_conf
    return f", with PYTORCH_CUDA_ALLOC_CONF={recipe.alloc_conf}" if changed else ""


def _by_keys(found: Plan) -> Iterator[str]:
    """What frameworks have keys for."""
    best = found.by_keys
    if best is None:
        yield "No plan that frameworks have keys for fits."
        return
    slower = best.time.seconds / found.chosen.time.seconds - 1
    words, milliseconds = best.recipe.checkpointing_words, 1000 * best.time.seconds
    yield f"What frameworks have keys for: {words}, {milliseconds:,.1f} ms per step, {100 * slower:.1f} % more."
    for name, title in _FRAMEWORKS.items():
        every = {"checkpoint_every": best.recipe.checkpoint_every} if best.recipe.checkpoint_every > 1 else {}
        moved = {"activation_offload": True} if best.recipe.activation_offload else {}
        keys = keys_for(name, checkpointing=best.recipe.checkpointing, **every, **moved)
        if keys is not None:
            yield f"  {title}: {', '.join(f'{key}: {json.dumps(value)}' for key, value in keys.items())}"


def candidate_line(candidate: Candidate) -> str:
    """A recipe that fits and is faster than those before."""
    time = candidate.time
    return f"{time.tokens_per_second:,.0f} tokens/s (predicted): {candidate.recipe.summary}"


def changes_text(found: Fastest, candidate: Candidate) -> str:
    """What a recipe trains at a time, and how."""
    recipe = candidate.recipe
    words = recipe.summary.removeprefix(found.recipe.spec.name).lstrip(", ")
    accumulated = f" x {recipe.grad_accum} micro-batches" if recipe.grad_accum > 1 else ""
    conf = f", {recipe.alloc_conf}" if recipe.alloc_conf and recipe.alloc_conf != found.recipe.alloc_conf else ""
    size, _, rest = words.partition(", ")
    moved = ", activations in main memory" if recipe.activation_offload else ""
    return f"{size}{accumulated}, {rest}{moved}{conf}"


def _remarks(found: Fastest) -> Iterator[str]:
    if (given := found.given) is not None:
        yield f"As given: {given.time.tokens_per_second:,.0f} tokens/s; it {describe_verdict(given.verdict)}."
    if found.found:
        yield from time_lines(found.found[0].time)
    if (large := found.too_large) is not None:
        speed = f"{large.time.tokens_per_second:,.0f} tokens/s"
        yield f"Faster, with {speed}: {changes_text(found, large)}; it {describe_verdict(large.verdict)}."
    yield f"{found.tried} recipes have a predicted time."
    for reason in found.left_out:
        yield f"not tried: {reason}"


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
    others = [step for step in advice.steps if step.state is not State.APPLIED]
    hidden = [] if show_all else [step for step in others if step.state is State.INAPPLICABLE]
    shown = [step for step in others if step not in hidden]
    return stacked(
        heading(advice.recipe.summary, advice.limit),
        f"Without changes it {describe_verdict(advice.verdict)}.",
        *((_plan_table(advice),) if advice.applied else ()),
        *_outcome(advice),
        *(f"note: {sentence}" for sentence in (*advice.notes, *remarks)),
        *_edit_lines(edits),
        ShellCommand(f"Next: {next_command}"),
        *((_others_table(shown), _LEGEND) if shown else ()),
        *([_hidden_line(hidden)] if hidden else []),
    )


def _hidden_line(hidden: Sequence[Step]) -> str:
    titles = ", ".join(step.change.title for step in hidden)
    return f"{titles} {'does' if len(hidden) == 1 else 'do'} not apply; --all says why."


def _edit_lines(edits: Sequence[FileEdit]) -> "Iterator[RenderableType]":
    from rich.text import Text

    for edit in edits:
        if edit.changes:
            yield f"In {edit.file}:"
        for line in edit.lines:
            # those of a file are copied, so not wrapped
            yield Text(line, no_wrap=True, overflow="ignore") if line[:1] in "+-" else line
    if edits and edits[0].not_in_file:
        having = "No file has a key" if len(edits) > 1 else "The file has no key"
        yield f"{having} for {', '.join(edits[0].not_in_file)}."


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
    saved, needed = ("" if size is None else format_mib(size) for size in (step.saved_bytes, step.needed_bytes))
    return saved, needed


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
    if advice.main_memory is not None:
        yield main_memory_text(advice.main_memory, advice.plan.gpus)
