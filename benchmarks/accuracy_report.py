"""Compare estimators with the measured steps: the tables and the figure of docs/accuracy.md.

    python benchmarks/accuracy_report.py table
    python benchmarks/accuracy_report.py check docs/accuracy.md
    python benchmarks/accuracy_report.py figure docs/figures/accuracy.png

`check` exits 1 if the median or the worst error of a row of ours is larger than in the page. Reads the results of
accuracy.py, zero.py and peers.py, and computes the analytic estimates again.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accuracy import RESULTS, ZERO_RESULTS, group_of, load_rows, recipe_of

from ligerprof.analyzers.estimate import estimate
from ligerprof.recipe.training import TrainingRecipe

PEERS = RESULTS.with_name("peers.json")
# smaller errors, as shares of the peak, are drawn at this value
FLOOR = 1e-6
OURS = ("ligerprof, simulated", "ligerprof, estimated")
Errors = Mapping[str, list[float]]


def plain_errors() -> dict[str, list[float]]:
    """Signed relative errors of every estimator on the steps without kernels, adapters or the old loss."""
    rows = [row for row in load_rows(RESULTS) if group_of(row["options"]) == "plain"]
    peers: dict[str, dict[str, Any]] = json.loads(PEERS.read_text())["plain"]
    found: dict[str, list[float]] = {name: [] for name in OURS}
    for row in rows:
        figures = {
            OURS[0]: row["simulated_peak_bytes"],
            OURS[1]: estimate(recipe_of(row["options"])).peak_bytes,
            **peers[str(row["number"])],
        }
        for name, size_bytes in figures.items():
            if isinstance(size_bytes, int):
                found.setdefault(name, []).append(size_bytes / row["peak_bytes"] - 1)
    return found


def zero_errors() -> dict[str, list[float]]:
    """Signed relative errors of every estimator on the steps under DeepSpeed."""
    peers: dict[str, dict[str, Any]] = json.loads(PEERS.read_text())["zero"]
    found: dict[str, list[float]] = {OURS[1]: []}
    for number, row in enumerate(load_rows(ZERO_RESULTS)):
        # other estimators were not asked about rows measured later
        if str(number) not in peers:
            continue
        figures = {OURS[1]: estimate(TrainingRecipe.from_json(row["recipe"])).peak_bytes, **peers[str(number)]}
        for name, size_bytes in figures.items():
            if isinstance(size_bytes, int):
                found.setdefault(name, []).append(size_bytes / row["peak_bytes"] - 1)
    return found


def table(errors: Errors) -> Iterator[str]:
    yield "| estimator | steps | median | worst under | worst over |"
    yield "|---|---:|---:|---:|---:|"
    for name, own in sorted(errors.items(), key=lambda item: statistics.median(map(abs, item[1]))):
        median = statistics.median(map(abs, own))
        cells = (name, str(len(own)), f"{median:.4%}" if median < 1e-2 else f"{median:.1%}")
        yield f"| {' | '.join(cells)} | {_percent(min(0, *own))} | {_percent(max(0, *own))} |"


def _percent(ratio: float) -> str:
    return f"{ratio:+.2%}" if abs(ratio) < 0.1 else f"{ratio:+,.0%}"


def worse(lines: Sequence[str], page: str) -> Iterator[str]:
    """The rows of ours that are worse than those of the page, in order."""
    now, before = ([line for line in each if line.startswith("| ligerprof, ")] for each in (lines, page.splitlines()))
    for new, old in zip(now, before, strict=True):
        errors = ([abs(float(cell.strip(" %"))) for cell in line.split("|")[3:6]] for line in (new, old))
        if any(one > other for one, other in zip(*errors, strict=True)):
            yield f"{new}\nwas\n{old}"


def draw(target: Path) -> None:
    """Draw the errors of every estimator, one mark per step."""
    from ligerprof.reports.figures.style import LineLook, new_figure, styled, write_figure, write_title

    errors = plain_errors()
    names = sorted(errors, key=lambda name: -statistics.median(map(abs, errors[name])))
    ours, others, middle = LineLook("#d55e00", "o", ""), LineLook("#0072b2", "o", ""), LineLook("#000000", "|", "")
    with styled():
        figure = new_figure(0.24 * len(names) + 0.5)
        axes = figure.add_subplot()
        for height, name in enumerate(names):
            sizes = [100 * max(abs(error), FLOOR) for error in errors[name]]
            look = (ours if name in OURS else others).arguments() | {"markersize": 2.5, "alpha": 0.5}
            axes.plot(sizes, [height] * len(sizes), markeredgewidth=0, **look)
            axes.plot([statistics.median(sizes)], [height], **middle.arguments() | {"markersize": 11})
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlim(100 * FLOOR / 2, None)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(-0.6, len(names) - 0.4)
        axes.set_xlabel("off the measured peak, %")
        axes.grid(visible=False, axis="y")
        steps = len(errors[OURS[0]])
        write_title(figure, f"{steps} training steps drawn at random on one H200; the bar is the median")
    write_figure(figure, target, force=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "check", "figure"))
    parser.add_argument("target", type=Path, nargs="?")
    arguments = parser.parse_args()
    if arguments.what == "figure":
        draw(arguments.target)
        return
    lines = [line for errors in (plain_errors(), zero_errors()) for line in (*table(errors), "")]
    print("\n".join(lines))
    if arguments.what == "check":
        found = list(worse(lines, arguments.target.read_text(encoding="utf-8")))
        print("\n".join(found or ["No median and no worst row of ours is worse than in the page."]))
        sys.exit(bool(found))


if __name__ == "__main__":
    main()
