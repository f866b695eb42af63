"""Figures: what they say, that nothing in them overlaps, and that they are the same file each time."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree as ET

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.figures import KIND_NAMES
from ligerprof.reports.figures import kinds as accuracy
from ligerprof.reports.figures.kernels import draw_bench
from ligerprof.reports.figures.kinds import (
    KINDS,
    Drawn,
    NothingToDrawError,
    SnapshotSource,
    Sources,
    draw,
    read_sources,
)
from ligerprof.reports.figures.style import HALF_PAGE_INCHES, mark_sizes, new_figure, styled, svg_text, write_figure
from ligerprof.runs.bench.records import Finding, read_lines
from ligerprof.runs.sweep.cells import Cell, CellStatus
from tests.cli.test_bench import ENVIRONMENT, example_records
from tests.golden import assert_matches_golden
from tests.paths import RESULTS
from tests.reports.figures.figures_data import (
    KERNELS,
    LIMIT,
    SNAPSHOTS,
    STEPS,
    STUDY,
    cells_of,
    description,
    laid_out,
    legends_over_data,
    outside,
    overlaps,
    roles_of,
    row,
    study_cells,
    study_rows,
    words,
)
from tests.sampling import sampled

GOLDEN = Path(__file__).parent / "golden"
UNIT = re.compile(
    r"(^|, |\b)(GiB|MiB|tokens|sequences|tokens/s|ms|%|decoder layer|entries)(, at (batch|sequence) \d+)?$"
)


@cache
def example(kind: str) -> tuple[Drawn, ...]:
    """A figure of the kind, laid out."""
    drawn = _example(kind)
    for one in drawn:
        laid_out(one.figure)
    return drawn


def _example(kind: str) -> tuple[Drawn, ...]:
    recordings = [SNAPSHOTS / f"{name}-ckpt-4x1024.pickle.xz" for name in ("hf", "liger-flce")]
    if kind in ("memory", "layers"):
        return draw(kind, read_sources(recordings))
    if kind == "accuracy":
        # an estimate 0.2 % low: the figure must not change with the real one
        with patch.object(accuracy, "estimated_peak_bytes", lambda recipe: _sum_of_roles(recipe) * 998 // 1000):
            return draw(kind, Sources(cells=cells_of(predicted_rows())))
    return draw(kind, Sources(cells=study_cells()))


def _sum_of_roles(recipe: TrainingRecipe) -> int:
    return sum(roles_of(recipe).values())


def example_findings() -> Iterator[Finding]:
    return (Finding(record=record, environment=ENVIRONMENT) for record in example_records())


def predicted_rows() -> Iterator[dict[str, Any]]:
    """Measured steps of many sizes, most of them simulated, too; one simulation is 1 % high."""
    for batch in range(1, 30):
        recipe = TrainingRecipe(model="tiny", seq=512, batch=batch)
        yield row(recipe)
        if batch % 3:
            figures = row(recipe, backend="simulated")
            yield figures | {"peak_bytes": figures["peak_bytes"] * (101 if batch == 20 else 100) // 100}


def check_layout(figure: Figure) -> None:
    check_laid_out(laid_out(figure))


def check_laid_out(figure: Figure) -> None:
    assert overlaps(figure) == []
    assert outside(figure) == []
    assert legends_over_data(figure) == []
    assert min(text.get_fontsize() for text in words(figure)) >= 8 * figure.get_figwidth() / _page(figure)


def _page(figure: Figure) -> float:
    """What the figure is made for: half a page, or a whole one."""
    return HALF_PAGE_INCHES if figure.get_figwidth() == HALF_PAGE_INCHES else 2 * HALF_PAGE_INCHES


@sampled("kind", sorted(KINDS), every=4)
def test_nothing_overlaps_is_cut_or_too_small(kind: str) -> None:
    for one in example(kind):
        check_laid_out(one.figure)


def numbers(ticks: Sequence[Any]) -> bool:
    return all(re.fullmatch(r"[\d.,\N{MINUS SIGN}]*", tick.get_text()) for tick in ticks)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_axis_of_numbers_has_a_unit(kind: str) -> None:
    for one in example(kind):
        panels = [axes for axes in one.figure.axes if axes.axison]
        for axes in panels:
            # panels in one column share the lowest one's title, panels in one row the leftmost one's
            column = [other for other in panels if other.get_position().x0 == axes.get_position().x0]
            line = [other for other in panels if other.get_position().y0 == axes.get_position().y0]
            along, up = column[-1], line[0]
            assert not numbers(along.get_xticklabels()) or UNIT.search(axes.get_xlabel() or along.get_xlabel())
            assert not numbers(up.get_yticklabels()) or UNIT.search(axes.get_ylabel() or up.get_ylabel())


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"memory"}))
def test_what_a_figure_says(kind: str) -> None:
    written_text = "\n\n".join(f"{one.name}: {description(one.figure, data=kind != 'layers')}" for one in example(kind))
    assert_matches_golden(written_text, GOLDEN / f"plot_{kind}.txt")


def test_the_checks_see_what_they_should() -> None:
    with styled():
        figure = new_figure(2.0)
        axes = figure.add_subplot()
        axes.set_xticks([0, 0.01, 1], ["nearly", "the same", "place"])
        axes.text(0.5, 0.5, "small", fontsize=7)
        axes.plot([0, 1], [0, 1], label="line")
        axes.legend(loc="center")
        figure.text(0.95, 0.5, "beyond the edge")
    laid_out(figure)
    assert ("nearly", "the same") in overlaps(figure)
    assert outside(figure) == ["beyond the edge"]
    assert len(legends_over_data(figure)) == 1
    with pytest.raises(AssertionError):
        check_layout(figure)


@pytest.mark.slow
def test_the_same_figure_is_the_same_file(tmp_path: Path) -> None:
    names = ("figure.svg", "figure.png")
    code = (
        "from pathlib import Path\n"
        "from ligerprof.reports.figures.kinds import draw, read_sources\n"
        "from ligerprof.reports.figures.style import write_figure\n"
        f"sources = read_sources([Path({str(RESULTS / 'steps-h200.jsonl')!r})])\n"
        "figure = draw('ablation', sources)[0].figure\n"
        f"for name in {names}:\n"
        f"    write_figure(figure, Path({str(tmp_path)!r}) / name, force=True)\n"
    )
    written = []
    for seed in ("1", "2"):
        subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONHASHSEED": seed}, timeout=60)
        written.append([(tmp_path / name).read_bytes() for name in names])
    assert written[0] == written[1]
    assert b"measured" in written[0][0]


def test_a_figure_is_as_wide_as_half_a_page_in_every_format(tmp_path: Path) -> None:
    (one,) = example("peak-batch")
    for name in ("png", "svg", "pdf"):
        write_figure(one.figure, tmp_path / f"figure.{name}", force=True)
    with Image.open(tmp_path / "figure.png") as image:
        assert image.width == pytest.approx(300 * HALF_PAGE_INCHES, abs=1)
    assert f'width="{72 * HALF_PAGE_INCHES:g}pt"' in (tmp_path / "figure.svg").read_text()
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert "Peak against batch, measured on NVIDIA H200" in svg_text(one.figure)


@given(sizes=st.lists(st.integers(1, 2**17), min_size=1, max_size=14, unique=True), wide=st.booleans())
@settings(max_examples=8, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_ticks_of_any_sizes_do_not_touch(sizes: Sequence[int], *, wide: bool) -> None:
    inches = 5.8 if wide else 2.7
    with styled():
        figure = new_figure(1.5, width_inches=inches + 0.7)
        axes = figure.add_subplot()
        axes.plot(sorted(sizes), [0.0] * len(sizes))
        mark_sizes(axes, sorted(sizes), width_inches=inches - 0.3)
    laid_out(figure)
    assert overlaps(figure) == []
    labelled = [text.get_text().strip() for text in axes.get_xticklabels() if text.get_text().strip()]
    assert set(labelled) <= {str(size) for size in sizes}
    assert len(labelled) >= min(len(sizes), 2)


def drawn_or_refused(kind: str, cells: Sequence[Cell]) -> tuple[tuple[Drawn, ...], str]:
    """The figures, or why there are none."""
    try:
        return draw(kind, Sources(cells=tuple(cells))), ""
    except NothingToDrawError as error:
        return (), str(error)


statuses = st.sampled_from(["done", "oom", "failed"])


@given(
    st.dictionaries(
        st.tuples(
            st.sampled_from(["none", "no-flce", "rms", "flce", "all"]),
            st.sampled_from(["ligerprof", "liger"]),
            st.integers(1, 40),
        ),
        st.tuples(statuses, st.sampled_from(["measured", "simulated"])),
        max_size=12,
    )
)
@settings(max_examples=3, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_whatever_a_sweep_holds_it_is_drawn_without_overlap_or_refused_in_words(
    grid: dict[tuple[str, str, int], tuple[str, str]],
) -> None:
    cells = cells_of(
        row(
            TrainingRecipe(model="tiny", seq=64, liger=liger, provider=provider, batch=batch),
            backend=backend,
            status=status,
            oom={"limit_bytes": 2**30} if status == "oom" else None,
        )
        for (liger, provider, batch), (status, backend) in grid.items()
    )
    kinds = ("batch", "peak-batch", "ablation", "roles", "accuracy")
    answers = {kind: drawn_or_refused(kind, cells) for kind in kinds}
    drawn = [one for figures, _ in answers.values() for one in figures]
    assert all(bool(figures) == (refusal == "") for figures, refusal in answers.values())
    assert all(
        refusal.startswith(f"{kind}: nothing to draw. It needs ") for kind, (_, refusal) in answers.items() if refusal
    )
    for one in drawn:
        check_layout(one.figure)
    backends = {cell.figures.backend for cell in cells if cell.figures and cell.status is not CellStatus.FAILED}
    titles = [one.figure.get_suptitle() for one in drawn if one.name != "accuracy"]
    assert {"simulated for an" in title for title in titles} <= {"measured": {False}, "simulated": {True}}.get(
        "".join(backends), {False, True}
    )


def test_lines_are_what_the_rows_say() -> None:
    peak, throughput = example("batch")[0].figure.axes
    found = {
        line.get_label(): dict(zip(*line.get_data(), strict=True))
        for line in (*peak.get_lines(), *throughput.get_lines())
        if line.get_label() == "all, liger"
    }
    rows = [
        values
        for values in study_rows()
        if (values["recipe"]["liger"], values["recipe"]["provider"], values["recipe"]["seq"]) == ("all", "liger", 1024)
    ]
    done = {values["recipe"]["batch"]: values["tokens_per_second"] for values in rows if values["status"] == "done"}
    assert found["all, liger"] == done
    assert len(done) < len(rows)


@sampled("source", [STEPS, KERNELS], ids=lambda path: path.stem, every=2)
def test_committed_results_are_drawn_without_overlap(source: Path) -> None:
    given = read_sources([source])
    drawn = [one for kind in KINDS.values() for one in kind.draw(given)]
    assert len(drawn) >= 2
    for one in drawn:
        check_layout(one.figure)


@sampled("findings", [tuple(example_findings()), read_lines(KERNELS)], ids=["made-up", "committed"], every=2)
def test_the_sheet_of_bench_is_laid_out_too(findings: Sequence[Finding]) -> None:
    sheet = laid_out(draw_bench(findings))
    assert overlaps(sheet) == outside(sheet) == legends_over_data(sheet) == []


def test_memory_that_runs_out_is_a_cross_at_the_limit() -> None:
    (one,) = example("peak-batch")
    (axes,) = one.figure.axes
    crosses = [line for line in axes.get_lines() if line.get_marker() == "x" and len(line.get_xdata())]
    none = next(line for line in axes.get_lines() if line.get_label() == "none")
    assert max(none.get_xdata()) == 8
    assert list(crosses[0].get_xdata()) == [16]
    assert {float(line.get_ydata()[0]) for line in crosses} == {LIMIT / 2**30}
    assert [text.get_text() for text in one.figure.legends[0].get_texts()][-2:] == [
        "out of memory",
        "limit, 23.5 GiB reserved",
    ]


def test_lines_differ_in_more_than_colour() -> None:
    (one,) = example("peak-batch")
    labels = {"none", "no-flce, ligerprof", "all, liger", "all, ligerprof"}
    lines = [line for line in one.figure.axes[0].get_lines() if line.get_label() in labels]
    looks = [(line.get_marker(), line.get_markerfacecolor() == "none", line._dash_pattern) for line in lines]
    assert len(looks) == 4
    assert len({look[:2] for look in looks}) == len({str(look[2]) for look in looks}) == 4


def test_a_recording_shows_the_loss_and_its_phases() -> None:
    (one,) = example("memory")
    before, after = one.figure.axes
    assert before.get_ylim() == after.get_ylim()
    assert {text.get_text() for text in before.texts} >= {"fwd", "backward"}
    labels = {label for axes in (before, after) for label in axes.get_legend_handles_labels()[1]}
    assert labels >= {"parameters", "optimizer_states", "ce_temporaries", "logits", "reserved"}


@pytest.mark.slow
def test_long_names_are_cut_to_their_panel() -> None:
    paths = [SNAPSHOTS / "small-streams.pickle.xz"] * 3
    named = [SnapshotSource(path=path, titles=(f"{number} {'w' * 60}",)) for number, path in enumerate(paths)]
    (one,) = draw("memory", Sources(snapshots=tuple(named)))
    check_layout(one.figure)
    assert [axes.get_title(loc="left")[-1] for axes in one.figure.axes if axes.axison] == ["…"] * 3


@pytest.mark.parametrize("name", ["$\\frac{", "<svg onload='x'>&", "a\x00b\ud800\u202e", "$1$", "{x}"])
def test_names_from_files_are_words_and_nothing_else(name: str, tmp_path: Path) -> None:
    rows = [
        row(TrainingRecipe(model="tiny", seq=64, batch=batch, liger="all", provider=provider), gpu=name)
        for batch in (1, 2)
        for provider in (name, "liger")
    ]
    (one,) = draw("peak-batch", Sources(cells=cells_of(rows)))
    for suffix in ("svg", "png"):
        write_figure(one.figure, tmp_path / f"figure.{suffix}", force=True)
    written_text = "".join(ET.parse(tmp_path / "figure.svg").getroot().itertext())
    shown = "".join(letter if letter.isprintable() else "?" for letter in name)
    assert f"measured on {shown}" in written_text
    assert f"all, {shown}" in written_text


def test_the_loss_of_2024_is_a_line_of_its_own_and_no_part_of_the_ablation() -> None:
    old = [row(TrainingRecipe(batch=batch, loss="hf-4.45", device="cuda", **STUDY)) for batch in (1, 4, 8)]
    given = Sources(cells=cells_of([*study_rows(), *old]))
    lines = {line.get_label(): line for line in draw("peak-batch", given)[0].figure.axes[0].get_lines()}
    today = {line.get_label(): line for line in example("peak-batch")[0].figure.axes[0].get_lines()}
    assert list(lines["none, hf-4.45"].get_xdata()) == [1, 4, 8]
    assert lines["none"]._dash_pattern == today["none"]._dash_pattern != lines["none, hf-4.45"]._dash_pattern
    assert description(draw("ablation", given)[0].figure, data=True) == (
        description(draw("ablation", Sources(cells=study_cells()))[0].figure, data=True)
    )


def test_a_file_says_in_the_fewest_words_how_it_differs() -> None:
    rows = [
        row(TrainingRecipe(model=model, batch=batch, precision=precision, seq=64))
        for model, precision in (("tiny", "bf16"), ("tiny", "fp32"), ("llama3.2-1b", "bf16"))
        for batch in (1, 2)
    ]
    names = [one.name for one in draw("peak-batch", Sources(cells=cells_of(rows)))]
    assert names == ["peak-batch-tiny-bf16", "peak-batch-tiny-fp32", "peak-batch-llama3.2-1b-bf16"]
    assert [one.name for one in example("peak-batch")] == ["peak-batch"]


def test_every_name_of_a_kind_has_a_kind() -> None:
    assert tuple(KINDS) == KIND_NAMES
