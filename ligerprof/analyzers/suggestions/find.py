"""Compute every suggestion that applies to a recording, the cheapest first, and write them into the user's files."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.suggestions.case import Case, Edit, Framework, peak_after
from ligerprof.analyzers.suggestions.rows import ROWS, Basis, Cost, Suggestion, SuggestionRow
from ligerprof.errors import LigerprofError, RecipeError
from ligerprof.roles import Phase, Role
from ligerprof.snapshots.trace import Int64s
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from ligerprof.recipe.configs.edits import FileEdit, OwnFiles
    from ligerprof.recipe.training import TrainingRecipe


# nn/parallel/distributed.py: the smallest bucket; smaller tensors are maps of unused parameters
_LEAST_BUCKET_BYTES = 2**20
# kWatchdogThreadSleepMillis
_WATCHDOG_US = 100_000


def other_timings(row: SuggestionRow, case: Case) -> list[Callable[[], Edit | None]]:
    """The row's effect if the first buckets live shorter or longer than recorded; none without DDP."""
    return [partial(_with_buckets_until, row, case, until) for until in _ends(row, case)]


def _with_buckets_until(row: SuggestionRow, case: Case, until: int) -> Edit | None:
    edit, first = row.edit(case), case.blocks_from(frames.DDP_FIRST_BUCKET)
    if edit is None:
        return None
    sizes, stops = edit.sizes(first), edit.stops(first)
    ends = np.full(len(first), until)
    edit.release(sizes, np.minimum(ends, stops), stops)
    edit.hold(sizes, stops, np.maximum(ends, stops))
    return edit


def _ends(row: SuggestionRow, case: Case) -> list[int]:
    """The moments after which the first buckets may be gone, the earliest first."""
    if case.program.engine is not Framework.DDP or not row.keeps_buckets:
        return []
    rebuilt = case.blocks_from(frames.DDP_REBUILT_BUCKET)
    rebuilt = rebuilt[case.sizes(rebuilt) >= _LEAST_BUCKET_BYTES]
    first = case.blocks_from(frames.DDP_FIRST_BUCKET)
    if not len(first) or not len(rebuilt):
        return []
    built = int(case.edit().starts(rebuilt).min())
    starts = [start for start, _ in case.backwards if start >= built]
    # when the first gradient of each backward pass is there
    made = (case.allocated_within(case.gradients, start, case.replayed.last_moment)[:1] for start in starts)
    collectives = [
        int(case.replayed.allocated_by[first[0]] if len(first) else start) + 1
        for start, first in zip(starts, made, strict=True)
    ]
    reduced = max((end for _, end in case.backwards if end <= built), default=built)
    earliest = min(built, int(case.edit().stops(first).max()))
    return [earliest, *collectives[: 1 + _missed_by_watchdog(case, reduced, collectives)]]


def _missed_by_watchdog(case: Case, reduced: int, collectives: list[int]) -> int:
    """How many of these collectives may come before the watchdog looks; 0 if events have no times."""
    times = case.replayed.trace.numbers("time_us")
    if not len(times) or not collectives:
        return 0
    since = times[np.minimum(collectives, len(times) - 1)] - times[max(reduced - 1, 0)]
    return int(np.count_nonzero(since < _WATCHDOG_US))


# of what is reserved, the part that may be free in pieces too small for any request
_FRAGMENTED_SHARE = 0.05


class NextStep(NamedTuple):
    """The second step's passes, where memory ran out in the first optimizer step.

    They hold the optimizer states, which those of the first step did not. A program that calls `zero_grad()` only after
    its forward pass also holds the gradients of the first step until then. In the first step there were none, but torch
    annotates the call.

    Attributes:
        peak_bytes: the highest allocated bytes, if gradients are freed before the forward pass.
        fits: whether that fits.
        must_free_gradients: whether it may not fit if gradients live until the program's late `zero_grad()`.
    """

    peak_bytes: int
    fits: bool
    must_free_gradients: bool


def find_next_step(row: SuggestionRow, case: Case) -> NextStep | None:
    """The step after a failure in the first optimizer step with a row's change; None for any other failure."""
    forwards, backwards = case.spans_of_phase(Phase.FORWARD), case.backwards
    optimizer = [start for start, _ in case.spans_of_phase(Phase.OPTIMIZER)]
    request = case.request
    if request is None or not (forwards and backwards and optimizer):
        return None
    first, backward, start = forwards[0][0], backwards[0][0], optimizer[0]
    if not first < backward < start or start < forwards[-1][0] or request.moment < start:
        return None
    _ = case.gradients
    case.book.learn(start)
    case.book.learn(request.moment)
    edit = row.edit(case)
    if edit is None:
        return None
    # each thread's workspace is allocated once and stays
    workspaces = case.book.live(start, Role.LIBRARY_WORKSPACE)
    begins = edit.starts(workspaces)
    edit.hold(case.replayed.block_bytes[workspaces], np.minimum(first, begins), begins)
    after = edit.allocated_bytes(None)
    temporary = () if Role.OPTIMIZER_TEMPORARIES in row.without else (Role.OPTIMIZER_TEMPORARIES,)
    states_bytes = max(0, int(after[request.moment] - after[start]) - case.book.bytes_at(request.moment, *temporary))
    zeroed = case.attribution.phases.zero_grad_starts
    held_bytes = 0
    if ((first < zeroed) & (zeroed <= backward)).any():
        gradients = () if Role.GRADIENTS in row.without else (Role.GRADIENTS,)
        held_bytes = int(np.max(after[first : backward + 1])) + states_bytes + case.book.bytes_at(start, *gradients)
    peak_bytes = int(np.max(after[first : start + 1])) + states_bytes
    fits_surely = held_bytes <= request.limit_bytes * (1 - _FRAGMENTED_SHARE)
    return NextStep(peak_bytes, fits=peak_bytes <= request.limit_bytes, must_free_gradients=not fits_surely)


# a smaller share of the peak is not worth a change
_LEAST_SHARE = 0.02
# memory that nothing uses; what a program keeps in every step also grows on
_MISTAKES = ("kept-outputs", "no-grad", "earlier-models")
# a smaller difference of the new peak is not worth a sentence
_VISIBLE_SHARE = 0.01
_ON_STATES = "The second step also holds optimizer states in its forward and backward passes: {}, which does not fit"
_ON_GRADIENTS = "The second forward pass would still hold the gradients of the first step: free them before it"
_ZERO_GRAD = next(row for row in ROWS if row.name == "zero-grad")
_ON_TIMING = "The new peak is {} if DDP drops its first buckets before the second step; this differs from run to run"


def find_suggestions(case: Case, recipe: "TrainingRecipe | None" = None) -> tuple[Suggestion, ...]:
    """The changes that lower the peak, by cost and then by bytes.

    Args:
        recipe: of the recorded step, if it is a step of ours.
    """
    recipe = recipe if _can_be_typed(recipe) else None
    before_bytes, _ = case.edit().highest(case.window, case.request)
    found = [one for row in ROWS for one in _evaluate(row, case, recipe, before_bytes)]
    order = list(Cost).index
    return tuple(sorted(found, key=lambda one: (order(one.cost), one.name not in _MISTAKES, -(one.saves_bytes or 0))))


def bytes_after(suggestion: Suggestion, case: Case) -> Int64s | None:
    """Allocated bytes at each moment after a suggestion that was found for this case; None if not computed."""
    row = next((row for row in ROWS if row.name == suggestion.name), None)
    if row is None:
        return None
    recorded = row.edit(case)
    edits = () if recorded is None else (recorded, *(change() for change in other_timings(row, case)))
    peaks = ((edit, edit.highest(case.window, case.request)[0]) for edit in edits if edit)
    edit = next((edit for edit, peak_bytes in peaks if peak_bytes == suggestion.new_peak_bytes), recorded)
    return None if edit is None else edit.allocated_bytes(case.request)


def _evaluate(
    row: SuggestionRow, case: Case, recipe: "TrainingRecipe | None", before_bytes: int
) -> Iterator[Suggestion]:
    if not row.applies(case):
        return
    skipped = row.skips(case)
    framework = next((one for one in case.program.frameworks if one not in skipped and row.lines(one)), None)
    if framework is None:
        return
    how = row.lines(framework)
    if recipe is not None and framework is Framework.LIGERPROF:
        command = _command(row, recipe)
        if command is None:
            return
        how = (command,)
    after = peak_after(partial(row.edit, case), case)
    if after is None:
        return
    others = (peak_after(change, case) for change in other_timings(row, case))
    peaks = [after, *(peak for peak in others if peak is not None)]
    new_peak_bytes, least_bytes = max(peaks), min(peaks)
    if before_bytes - new_peak_bytes < _LEAST_SHARE * before_bytes:
        return
    depends = new_peak_bytes - least_bytes >= _VISIBLE_SHARE * new_peak_bytes
    timing = _ON_TIMING.format(format_bytes(least_bytes)) if depends else ""
    conditions = [text for text in (row.condition, timing) if text]
    basis = Basis.REPLAYED if row.is_whole(case) else row.basis
    basis = Basis.AT_LEAST if conditions and basis is Basis.REPLAYED else basis
    lets_pass = _lets_pass(basis, case, new_peak_bytes)
    following = find_next_step(row, case) if lets_pass else None
    if following is not None and not following.fits:
        lets_pass = False if basis is Basis.REPLAYED else None
        conditions.append(_ON_STATES.format(format_bytes(following.peak_bytes)))
    elif following is not None and following.must_free_gradients and _ZERO_GRAD.applies(case):
        how = (*how, *_ZERO_GRAD.torch)
        conditions.append(_ON_GRADIENTS)
    yield Suggestion(
        name=row.name,
        change=row.change,
        without=row.without,
        saves_bytes=before_bytes - new_peak_bytes,
        new_peak_bytes=new_peak_bytes,
        cost=row.cost[0],
        cost_reason=row.cost[1],
        how=how,
        framework=framework,
        lets_pass=lets_pass,
        basis=basis,
        least_peak_bytes=least_bytes if depends else None,
        condition=". ".join(conditions),
    )


def _lets_pass(basis: Basis, case: Case, new_peak_bytes: int) -> bool | None:
    """Whether the failed allocation would have succeeded, as far as the basis of the saving allows to say."""
    if case.request is None or basis is Basis.ESTIMATED:
        return None
    fits = new_peak_bytes <= case.request.limit_bytes
    return fits if fits or basis is Basis.REPLAYED else None


def _command(row: SuggestionRow, recipe: "TrainingRecipe") -> str | None:
    """The whole command for the changed recipe, None if the row does not apply to it."""
    from ligerprof.recipe.flags import command_line

    try:
        changed = row.recipe(recipe)
    except LigerprofError:
        return None
    return None if changed is None else command_line("step", changed)


def _can_be_typed(recipe: "TrainingRecipe | None") -> bool:
    if recipe is None:
        return False
    from ligerprof.recipe.training import TrainingRecipe

    try:
        return TrainingRecipe(model=recipe.spec.name).spec == recipe.spec
    except LigerprofError:
        return False


def edits_for(suggestion: Suggestion, own: "OwnFiles") -> "tuple[FileEdit, ...]":
    """The files that the suggestion changes; none if they lack keys for it."""
    from ligerprof.recipe.configs.edits import edit_files

    change = next((row.recipe for row in ROWS if row.name == suggestion.name), None)
    try:
        changed = None if change is None else change(own.recipe)
        edits = () if changed is None else edit_files(own.files, own.recipe, changed)
    except LigerprofError:
        # the program differs from what the files say
        return ()
    return tuple(edit for edit in edits if edit.changes and not edit.missing)


def lines_for(suggestion: Suggestion, own: "OwnFiles") -> tuple[str, ...]:
    """The lines to change; none if the files have no keys for the suggestion."""
    return tuple(line for edit in edits_for(suggestion, own) for line in (f"In {edit.file}:", *edit.lines))


def read_own_files(sources: Sequence[str]) -> "OwnFiles":
    """Read the files that a training was started with, as `load_recipe` takes them.

    Raises:
        RecipeError: a file cannot be read, or none can be edited.
        UnsupportedError: a file asks for something that recipes cannot express.
    """
    from ligerprof.recipe.configs.edits import EDITABLE, OwnFiles, can_edit
    from ligerprof.recipe.configs.resolve import load_recipe

    recipe, report = load_recipe(sources, {})
    if not any(can_edit(*each) for each in report.files):
        raise RecipeError(f"--config: changed lines can be shown for files of {EDITABLE}. Give one of these.")
    return OwnFiles(sources=sources, given={}, files=report.files, recipe=recipe)


def in_own_files(suggestions: Sequence[Suggestion], own: "OwnFiles") -> tuple[Suggestion, ...]:
    """Suggestions with the lines to change in the files; those that these have no keys for stay as they are."""
    lines = {suggestion.name: lines_for(suggestion, own) for suggestion in suggestions}
    return tuple(dataclasses.replace(each, how=lines[each.name] or each.how) for each in suggestions)


def first_edits(suggestions: Sequence[Suggestion], own: "OwnFiles") -> "tuple[Suggestion, tuple[FileEdit, ...]] | None":
    """The first suggestion that the files have keys for, with the changed files; None without one."""
    found = ((suggestion, edits_for(suggestion, own)) for suggestion in suggestions)
    return next(((suggestion, edits) for suggestion, edits in found if edits), None)
