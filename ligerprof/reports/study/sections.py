"""The sections of the study's report: what each table says, and the sentences that its figures make."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from ligerprof.reports.closed_form import estimated_peak_bytes
from ligerprof.reports.study.facts import (
    ALL,
    COLUMNS,
    LIGER_ALL,
    LINES,
    NO_FLCE,
    NONE,
    SINGLES,
    Facts,
    KernelColumn,
    column_of,
    largest_and_smallest,
    minutes_apart,
    sizes_on,
)
from ligerprof.reports.study.text import BEYOND, gib, peak, peak_and_reserved, percent, speed, table
from ligerprof.roles import Role
from ligerprof.runs.study.cells import (
    ABLATION_BATCH,
    BATCHES,
    EXPLAINED_BATCHES,
    PAPER_SEQ,
    SEQUENCES,
    SWEEP_BATCH,
    SWEEP_SEQ,
)
from ligerprof.runs.sweep.borders import Axis, edges
from ligerprof.runs.sweep.cells import Cell, CellStatus
from ligerprof.torch_memory.dtypes import FP32_BYTES
from ligerprof.units import format_bytes, format_mib

# roles below this share of every peak in the table are left out of it
_SMALLEST_SHARE = 0.005
# two cells that ended within this were measured in turns
TURN_MINUTES = 10


def sweep_tables(facts: Facts, axis: Axis) -> list[str]:
    """Peak and reserved bytes, then speed, against batch or sequence; sizes of a search are left to the borders."""
    grid = BATCHES if axis == "batch" else SEQUENCES
    found = sizes_on((cell for column in COLUMNS for cell in facts.zero(column)), axis)
    sizes = [size for size in grid if size in found]
    if len(sizes) < 2:
        return []
    heading = "batch" if axis == "batch" else "sequence"
    fixed = f"sequence {SWEEP_SEQ}" if axis == "batch" else f"batch {SWEEP_BATCH}"
    tables = []
    for title, write in (("Peak allocated / reserved, GiB", peak_and_reserved), ("Tokens a second", speed)):
        rows = [[f"{size:,}", *(_shown(facts, column, axis, size, write) for column in COLUMNS)] for size in sizes]
        tables += [f"{title}, at {fixed}:", "", *table([heading, *(column.title for column in COLUMNS)], rows)]
    return tables


def _shown(facts: Facts, column: KernelColumn, axis: Axis, size: int, write: Callable[[Cell | None], str]) -> str:
    cells = facts.zero(column)
    batch, seq = (size, SWEEP_SEQ) if axis == "batch" else (SWEEP_BATCH, size)
    cell = facts.find(column, batch=batch, seq=seq)
    _, smallest_oom = largest_and_smallest(cells, axis)
    return _or_beyond(write, cell, size, smallest_oom)


def _or_beyond(write: Callable[[Cell | None], str], cell: Cell | None, size: int, smallest_oom: int | None) -> str:
    """What is written of a cell; a dash above a size that was out of memory, where it was not run."""
    return BEYOND if cell is None and smallest_oom is not None and size > smallest_oom else write(cell)


def borders(facts: Facts) -> list[str]:
    """The largest size that ran on each line, and the smallest that did not."""
    rows = []
    for axis, name in LINES.items():
        for column in COLUMNS:
            largest, smallest = largest_and_smallest(facts.zero(column), axis)
            if largest is not None or smallest is not None:
                ran = "none" if largest is None else f"{largest:,}"
                rows.append([name, column.title, ran, "not reached" if smallest is None else f"{smallest:,}"])
    return table(["border of", "kernels", "largest that ran", "smallest out of memory"], rows) if rows else []


def beside_liger(facts: Facts) -> list[str]:
    """Our kernels against liger-kernel's wherever both ran."""
    pairs = list(_pairs(facts.zero(ALL), facts.zero(LIGER_ALL)))
    if not pairs:
        return []
    rows = [
        [
            f"{ours.recipe.batch} x {ours.recipe.seq:,}",
            peak_and_reserved(ours),
            peak_and_reserved(theirs),
            percent(_peak_bytes(ours) / _peak_bytes(theirs)),
            speed(ours),
            speed(theirs),
            percent(_speed(ours) / _speed(theirs)),
            "" if (minutes := minutes_apart((ours, theirs))) is None else f"{minutes}",
        ]
        for ours, theirs in pairs
    ]
    peaks = _spread(_peak_bytes(ours) / _peak_bytes(theirs) for ours, theirs in pairs)
    headings = ["batch x sequence", "ours: peak / reserved, GiB", "liger-kernel", "peak", "ours: tokens/s"]
    return [
        *table([*headings, "liger-kernel", "tokens/s", "minutes apart"], rows),
        f"Our peak against liger-kernel's: {peaks}.",
        "",
        *_speeds_by_turn(pairs),
    ]


def _speeds_by_turn(pairs: Iterable[tuple[Cell, Cell]]) -> Iterator[str]:
    """How fast ours are where both were measured in turns, and where they were not."""
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for ours, theirs in pairs:
        minutes = minutes_apart((ours, theirs))
        ratios[minutes is not None and minutes <= TURN_MINUTES].append(_speed(ours) / _speed(theirs))
    for in_turns, found in ratios.items():
        if found:
            where = f"where both ended within {TURN_MINUTES} minutes" if in_turns else "elsewhere"
            yield f"Our tokens a second against liger-kernel's {where}: {_spread(found)}."
            yield ""


def _spread(ratios: Iterable[float]) -> str:
    found = sorted(ratios)
    median = percent(statistics.median(found))
    return f"{percent(found[0])} to {percent(found[-1])}, {median} in the median of {len(found)} sizes"


def ablation(facts: Facts) -> list[str]:
    """Each kernel alone, then together, beside none."""
    base = facts.find(NONE, batch=ABLATION_BATCH, seq=SWEEP_SEQ)
    if base is None:
        return []
    rows, shown = [], [base]
    for column in (*SINGLES, NO_FLCE, ALL):
        cell = facts.find(column, batch=ABLATION_BATCH, seq=SWEEP_SEQ)
        if cell is not None and _both_ran(base, cell):
            gain = percent(_peak_bytes(cell) / _peak_bytes(base))
            rows.append([column.title, peak(cell), gain, speed(cell), percent(_speed(cell) / _speed(base))])
            shown.append(cell)
    if len(rows) < 3:
        return []
    first = ["none", peak(base), "", speed(base), ""]
    return [
        f"At batch {ABLATION_BATCH} and sequence {SWEEP_SEQ}{_within(shown)}:",
        "",
        *table(["kernels", "peak, GiB", "against none", "tokens/s", "against none"], [first, *rows]),
    ]


def peaks_by_role(facts: Facts) -> list[str]:
    """Who holds the peak at the batches that the study explains, without kernels and with all."""
    found = [
        (f"{batch}, {column.title}", cell)
        for batch in EXPLAINED_BATCHES
        for column in (NONE, ALL)
        if (cell := facts.find(column, batch=batch, seq=SWEEP_SEQ)) is not None and cell.status is CellStatus.DONE
    ]
    if not found:
        return []
    cells = [cell for _, cell in found]
    rows = [
        [role.value, *(format_mib(_role_bytes(cell, role)) for cell in cells)]
        for role in Role
        if any(_role_bytes(cell, role) >= _SMALLEST_SHARE * _peak_bytes(cell) for cell in cells)
    ]
    rows.append(["all roles", *(format_mib(_peak_bytes(cell)) for cell in cells)])
    return [
        f"MiB at the peak by batch and kernels, sequence {SWEEP_SEQ}; roles under half a percent are in the sum alone:",
        "",
        *table(["role", *(title for title, _ in found)], rows),
        *_loss_sentence(facts),
    ]


def _loss_sentence(facts: Facts) -> Iterator[str]:
    batch = max(EXPLAINED_BATCHES)
    plain, fused = (facts.find(column, batch=batch, seq=SWEEP_SEQ) for column in (NONE, ALL))
    if plain is None or fused is None or not _both_ran(plain, fused):
        return
    planes = [Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES]
    held = sum(_role_bytes(plain, role) for role in planes)
    gone = _peak_bytes(plain) - _peak_bytes(fused)
    yield (
        f"At batch {batch} the loss's planes are {format_bytes(held)}, {100 * held / _peak_bytes(plain):.0f} % of the "
        f"peak. All kernels take the peak from {format_bytes(_peak_bytes(plain))} to "
        f"{format_bytes(_peak_bytes(fused))}: {format_bytes(gone)} less."
    )
    yield ""


def closed_form(facts: Facts) -> list[str]:
    """Every peak beside the closed form's."""
    done = [cell for cell in facts.cells if cell.status is CellStatus.DONE and cell.figures is not None]
    estimated = [(cell, estimated_peak_bytes(cell.recipe)) for cell in done]
    found = [(cell, peak_bytes, peak_bytes / _peak_bytes(cell)) for cell, peak_bytes in estimated if peak_bytes]
    if not found:
        return []
    errors = sorted(abs(ratio - 1) for *_, ratio in found)
    worst, *_ = max(found, key=lambda one: abs(one[2] - 1))
    rows = [
        [_name(cell), gib(_peak_bytes(cell)), gib(peak_bytes), percent(ratio, 2)] for cell, peak_bytes, ratio in found
    ]
    without = f"; {len(done) - len(found)} more have no closed form" if len(found) < len(done) else ""
    off = f"{100 * statistics.median(errors):.2f} % in the median and by {100 * errors[-1]:.2f} % at the worst"
    return [
        f"Over {len(found)} steps the closed form is off by {off} ({_name(worst)}){without}.",
        "",
        "<details><summary>Every step</summary>",
        "",
        *table(["step", "peak, GiB", "closed form, GiB", "error"], rows),
        "</details>",
        "",
    ]


def loss_of_2024(facts: Facts) -> list[str]:
    """The loss as transformers 4.45 made it, beside today's."""
    rows = []
    for cell in facts.zero(NONE, loss="hf-4.45"):
        recipe = cell.recipe
        today = facts.find(NONE, batch=recipe.batch, seq=recipe.seq)
        plane = recipe.tokens * recipe.spec.vocab_size * FP32_BYTES
        rows.append(
            [
                f"{recipe.batch} x {recipe.seq:,}",
                peak_and_reserved(today),
                peak_and_reserved(cell),
                _planes_held(cell, plane),
                gib(plane),
            ]
        )
    if not rows:
        return []
    sizes = ("today: peak / reserved, GiB", "as in 4.45: peak / reserved, GiB")
    headings = ["batch x sequence", *sizes, "its planes at the peak", "one fp32 plane, GiB"]
    return table(headings, rows)


def _planes_held(cell: Cell, plane_bytes: int) -> str:
    if cell.status is not CellStatus.DONE:
        return ""
    held = sum(_role_bytes(cell, role) for role in (Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES))
    return f"{held / plane_bytes:.2f} x"


def paper(facts: Facts) -> list[str]:
    """Llama-3-8B in bf16: peak and speed against batch, none and all."""
    plain_cells, fused_cells = ({cell.recipe.batch: cell for cell in facts.paper(column)} for column in (NONE, ALL))
    (_, plain_oom), (_, fused_oom) = (edges(cells.values(), "batch") for cells in (plain_cells, fused_cells))
    rows = []
    for batch in sorted({*plain_cells, *fused_cells}):
        plain, fused = plain_cells.get(batch), fused_cells.get(batch)
        row = [f"{batch}"]
        for write, figure in ((peak_and_reserved, _peak_bytes), (speed, _speed)):
            row += [_or_beyond(write, plain, batch, plain_oom), _or_beyond(write, fused, batch, fused_oom)]
            if plain is not None and fused is not None and _both_ran(plain, fused):
                row.append(percent(figure(fused) / figure(plain)))
            else:
                row.append("")
        rows.append(row)
    if not rows:
        return []
    within = _within((*plain_cells.values(), *fused_cells.values()))
    headings = ["batch", "none: peak / reserved, GiB", "all", "peak", "none: tokens/s", "all", "tokens/s"]
    return [f"At sequence {PAPER_SEQ}{within}:", "", *table(headings, rows)]


def _within(cells: Iterable[Cell]) -> str:
    """Over what time cells were measured, as the end of a sentence; nothing where rows do not say."""
    minutes = minutes_apart(cells)
    return "" if minutes is None else f", measured within {minutes} minutes"


def _name(cell: Cell) -> str:
    recipe = cell.recipe
    loss = "" if recipe.loss == "hf" else f", loss {recipe.loss}"
    return f"{recipe.spec.name}, {recipe.batch} x {recipe.seq:,}, {column_of(recipe).title}{loss}"


def _pairs(ours: Sequence[Cell], theirs: Sequence[Cell]) -> Iterator[tuple[Cell, Cell]]:
    """Cells of the same size that both ran, the smallest number of tokens first."""
    others = {(cell.recipe.batch, cell.recipe.seq): cell for cell in theirs}
    for cell in sorted(ours, key=lambda cell: (cell.recipe.tokens, cell.recipe.batch)):
        other = others.get((cell.recipe.batch, cell.recipe.seq))
        if other is not None and _both_ran(cell, other):
            yield cell, other


def _both_ran(first: Cell, second: Cell | None) -> bool:
    return second is not None and all(
        cell.status is CellStatus.DONE and cell.figures is not None and cell.tokens_per_second is not None
        for cell in (first, second)
    )


def _peak_bytes(cell: Cell) -> int:
    return cell.figures.peak_bytes if cell.figures is not None else 0


def _speed(cell: Cell) -> float:
    return cell.tokens_per_second or 0.0


def _role_bytes(cell: Cell, role: Role) -> int:
    return cell.figures.roles[role] if cell.figures is not None else 0
