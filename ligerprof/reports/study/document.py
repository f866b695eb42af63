"""The study's report as one Markdown file: its sections in order, each with its figures beside it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ligerprof.files import require_absent, write_new_file
from ligerprof.reports.study import sections
from ligerprof.reports.study.facts import (
    ALL,
    COLUMNS,
    LIGER_ALL,
    LINES,
    NO_FLCE,
    NONE,
    SINGLES,
    Facts,
    largest_and_smallest,
    read_facts,
    sizes_on,
)
from ligerprof.reports.study.missing import Gap, find_gaps, gaps_in_words, not_measured
from ligerprof.reports.study.text import BEYOND, OUT_OF_MEMORY
from ligerprof.runs.study.cells import ABLATION_BATCH, EXPLAINED_BATCHES, SWEEP_BATCH, SWEEP_SEQ
from ligerprof.runs.sweep.borders import Axis
from ligerprof.runs.sweep.cells import Cell, CellStatus
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "README.md"
_GAPS = "Not measured yet"
# what the report says of 2024 is what that study printed: an RTX 4090, transformers 4.45, liger-kernel 0.3
_LOST_BATCH, _LOST_SEQ, _REACHED_BATCH, _REACHED_SEQ = 16, 2048, 112, 24576


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One section of the report; left out where it has nothing to say.

    Attributes:
        lead: what the reader looks at, before the tables.
        figures: name of a figure's file without suffix, what it shows, and how it is drawn.
    """

    title: str
    lead: str
    lines: Sequence[str]
    figures: tuple[tuple[str, str, Callable[[], "Figure | None"]], ...] = ()


def write_report(paths: Sequence[Path], folder: Path, *, force: bool) -> Path:
    """Write README.md and its figures, SVG each, into a folder.

    Args:
        paths: result files, or folders of sweeps; of two rows of one cell the last counts.

    Raises:
        OutputError: the report is there already, or the disk refuses.
        ResultFormatError: a file that no sweep wrote, or no cell in any.
    """
    target = folder / NAME
    require_absent([target], force=force)
    facts = read_facts(paths)
    found = [section for section in _sections(facts) if section.lines]
    write_new_file(target, "\n".join(_document(facts, found, folder)).rstrip() + "\n", force=force)
    return target


def _document(facts: Facts, found: Sequence[Section], folder: Path) -> Iterator[str]:
    yield "# The study again"
    yield ""
    yield from _summary(facts)
    for section in found:
        yield f"## {section.title}"
        yield ""
        if section.lead:
            yield section.lead
            yield ""
        yield from section.lines
        for name, shows, draw in section.figures:
            if _write_figure(draw, folder / f"{name}.svg"):
                yield f"![{shows}]({name}.svg)"
                yield ""


def _write_figure(draw: Callable[[], "Figure | None"], path: Path) -> bool:
    from ligerprof.reports.figures.style import write_figure

    figure = draw()
    if figure is None:
        return False
    write_figure(figure, path, force=True)
    return True


def _summary(facts: Facts) -> Iterator[str]:
    if facts.limit_bytes is not None:
        yield (
            "Llama-3.2-1B under DeepSpeed ZeRO-3 with parameters, gradients and optimizer in main memory, CPU Adam, "
            f"gradient checkpointing and fp16, torch's allocator held to {format_bytes(facts.limit_bytes)}."
        )
        yield ""
    versions = ", ".join(f"{package} {version}" for package, version in facts.versions)
    lost = sum(cell.status is CellStatus.OOM for cell in facts.cells)
    yield (
        f"{len(facts.cells)} steps, {lost} of them out of memory, {facts.origin}, {_days(facts.days)}, with {versions}."
    )
    yield ""
    gaps = find_gaps(facts)
    yield from _result(facts, gaps)
    blank = "; blank: not measured yet" if gaps else ""
    yield (
        "`ligerprof study` runs all of it again and `ligerprof study --report` writes this page: every figure in it, "
        f"but the closed form's, comes from result files. {OUT_OF_MEMORY}: out of memory; {BEYOND}: above a size of "
        f"the same column that was out of memory, and not run{blank}. Peak is the most that was allocated in a steady "
        "step, reserved the most that torch's allocator took for it."
    )
    yield ""


def _days(days: Sequence[str]) -> str:
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _result(facts: Facts, gaps: Sequence[Gap]) -> Iterator[str]:
    """The study's result in a sentence for each axis, from what was found here."""
    plain, fused = facts.zero(NONE), facts.zero(ALL)
    for axis, name in LINES.items():
        without, lost = largest_and_smallest(plain, axis)
        with_all, with_lost = largest_and_smallest(fused, axis)
        if without is not None and with_all is not None:
            lost_text = "" if lost is None else f" ({lost:,} is out of memory)"
            end = "" if with_lost is None else f" ({with_lost:,} is out of memory)"
            yield f"- Largest {name}: {without:,} without fused kernels{lost_text}, {with_all:,} with all of them{end}."
    if gaps:
        yield f"- [{_GAPS}](#{_GAPS.lower().replace(' ', '-')}), or not all of it: {gaps_in_words(gaps)}."
    yield ""


def _sections(facts: Facts) -> Iterator[Section]:
    zero = [cell for column in COLUMNS for cell in facts.zero(column)]
    yield Section(
        title="Batch",
        lead="",
        lines=sections.sweep_tables(facts, "batch"),
        figures=(_drawn("batch", "Peak and tokens a second against batch", "batch", _line(zero, "batch")),),
    )
    yield Section(
        title="Sequence",
        lead="",
        lines=sections.sweep_tables(facts, "seq"),
        figures=(_drawn("sequence", "Peak and tokens a second against sequence", "seq", _line(zero, "seq")),),
    )
    yield Section(
        title="Borders",
        lead="Of everything that was run, the searches between the sizes of the grids included.",
        lines=sections.borders(facts),
    )
    yield Section(
        title="Our kernels and liger-kernel's",
        lead=(
            "A peak is the same at any hour. Speeds compare best where both were measured within "
            f"{sections.TURN_MINUTES} minutes of each other."
        ),
        lines=sections.beside_liger(facts),
    )
    yield Section(
        title="What each kernel gives",
        lead="",
        lines=sections.ablation(facts),
        figures=(_drawn("ablation", "Peak and tokens a second of each kernel alone", "ablation", _alone(facts)),),
    )
    yield Section(
        title="Who holds the peak",
        lead="",
        lines=sections.peaks_by_role(facts),
        figures=(_drawn("roles", "Bytes at the peak by role", "roles", _explained(facts)),),
    )
    yield Section(
        title="The closed form beside it",
        lead=(
            "`ligerprof estimate` knows the recipe alone and has no fitted constant. Its figures are those of the "
            "version that wrote this page; it may have been corrected since a step was measured."
        ),
        lines=sections.closed_form(facts),
        figures=(_drawn("accuracy", "Error of the closed form over the peak", "accuracy", facts.cells),),
    )
    yield Section(
        title="The loss of 2024",
        lead=(
            "transformers 4.45 cast the logits up, made a contiguous shifted copy of them, and its loss made another "
            "plane; since 4.49 labels are shifted instead. `--loss hf-4.45` brings the old loss back. The planes are "
            "what the roles logits, shift_logits and ce_temporaries hold at the peak, in planes of one fp32 number a "
            "logit; what the allocator reserves shows copies that are gone by then."
        ),
        lines=sections.loss_of_2024(facts),
    )
    yield Section(
        title="Llama-3-8B",
        lead="The Liger paper's model in bf16 (weights, gradients and moments), AdamW, checkpointed, no limit.",
        lines=sections.paper(facts),
        figures=(_drawn("llama3-8b", "Llama-3-8B: peak and tokens a second", "batch", _of_paper(facts)),),
    )
    yield Section(title="What differs from 2024", lead="", lines=_differences(facts))
    yield Section(title=_GAPS, lead="What the study asks for and these rows do not hold:", lines=not_measured(facts))


def _drawn(name: str, shows: str, kind: str, cells: Sequence[Cell]) -> tuple[str, str, Callable[[], "Figure | None"]]:
    """A figure of a kind that `ligerprof plot` draws; None where the cells do not allow it."""

    def draw() -> "Figure | None":
        from ligerprof.reports.figures.kinds import KINDS, PlotInput
        from ligerprof.reports.figures.sources import Sources

        drawn = next(KINDS[kind].draw(PlotInput(sources=Sources(cells=tuple(cells)))), None)
        return None if drawn is None else drawn.figure

    return name, shows, draw


def _line(cells: Sequence[Cell], axis: Axis) -> list[Cell]:
    """The cells of one sweep, those of a search left out: a curve of the grid alone."""
    sizes = set(sizes_on((cell for cell in cells if cell.recipe.kernels), axis))
    fixed = ("seq", SWEEP_SEQ) if axis == "batch" else ("batch", SWEEP_BATCH)
    return [
        cell for cell in cells if getattr(cell.recipe, fixed[0]) == fixed[1] and getattr(cell.recipe, axis) in sizes
    ]


def _alone(facts: Facts) -> list[Cell]:
    cells = (
        facts.find(column, batch=ABLATION_BATCH, seq=SWEEP_SEQ) for column in (NONE, *SINGLES, NO_FLCE, ALL, LIGER_ALL)
    )
    return [cell for cell in cells if cell is not None]


def _explained(facts: Facts) -> list[Cell]:
    return [
        cell
        for column in (NONE, ALL)
        for cell in facts.zero(column)
        if cell.recipe.seq == SWEEP_SEQ and cell.recipe.batch in EXPLAINED_BATCHES
    ]


def _of_paper(facts: Facts) -> list[Cell]:
    return [cell for column in (NONE, ALL) for cell in facts.paper(column)]


def _differences(facts: Facts) -> list[str]:
    plain, fused = facts.zero(NONE), facts.zero(ALL)
    batch, lost_batch = largest_and_smallest(plain, "batch")
    seq, lost_seq = largest_and_smallest(plain, "seq")
    if None in (batch, lost_batch, seq, lost_seq):
        return []
    reached_batch, _ = largest_and_smallest(fused, "batch")
    reached_seq, _ = largest_and_smallest(fused, "seq")
    old = facts.find(NONE, batch=SWEEP_BATCH, seq=_LOST_SEQ, loss="hf-4.45")
    tokens = f"{SWEEP_BATCH * _LOST_SEQ // SWEEP_SEQ} x {SWEEP_SEQ:,}"
    card = "An RTX 4090 with 24 GB then, a larger card held to a limit here: bytes compare, speed does not."
    by_batch = f"{_LOST_BATCH} was out of memory then; here {batch} runs and {lost_batch} does not."
    by_seq = (
        f"{_LOST_SEQ:,} was out of memory then; here {seq:,} runs and {lost_seq:,} does not. {SWEEP_BATCH} x "
        f"{_LOST_SEQ:,} are as many tokens as {tokens}, and what the loss takes goes by tokens."
    )
    lines = [
        f"- **The card.** {card}",
        f"- **Batch without kernels.** {by_batch}",
        f"- **Sequence without kernels.** {by_seq}",
    ]
    if old is not None:
        end = "is out of memory here, too" if old.status is CellStatus.OOM else "runs here as well"
        lines[-1] += f" With the loss of transformers 4.45 {SWEEP_BATCH} x {_LOST_SEQ:,} {end}."
    lines.append(
        f"- **With all kernels** batch {_REACHED_BATCH} and sequence {_REACHED_SEQ:,} ran then, the largest that were "
        f"tried; here {reached_batch or 'none'} and {reached_seq or 0:,}."
    )
    return [*lines, ""]
