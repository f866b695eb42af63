"""Make the rates of the time model from measurements, and compare predicted with measured times of held-out steps.

    cd benchmarks/results
    python ../time_accuracy.py rates time-rates-h200.jsonl time-steps-h200.jsonl h200.json
    python ../time_accuracy.py table time-steps-h200.jsonl steps-h200.jsonl

`rates` reads the rows of time_rates.py and, for what a call costs the host, the tuning rows of time_steps.py; no other
row of steps is read. `table` prints the tables of docs/time.md; neither needs a GPU.
"""

import argparse
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ligerprof.analyzers.step_time.account import account, predicted_time
from ligerprof.analyzers.step_time.rates import Bound, Host, Ledger, Part, product
from ligerprof.errors import LigerprofError
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe

WAYS = {
    "pointwise": ("add", "mul-fp32", "cast-down", "silu", "silu-backward", "pow", "cat"),
    "upcast": ("cast-up",),
    "broadcast": ("broadcast",),
    "copy": ("heads",),
    "reduce": ("mean-rows", "sum-columns"),
    "softmax": ("softmax", "log-softmax", "log-softmax-backward"),
    "norm": ("layer-norm",),
    "gather": ("embedding",),
}
WAY_OF = {kernel: way for way, kernels in WAYS.items() for kernel in kernels}
WIDTHS = {"bf16": 2, "fp32": 4, "tf32": 4}
# tensors up to this size are in the cache half of the time
CACHED_BYTES = 64 << 20
FOREACH_LAUNCHES, TENSORS_PER_LAUNCH = 12, 30
# a step whose kernels take less than this share of its time waits for the host
WAITING = 0.8
# pairs of one model whose measured times differ by more are to be in the right order
APART = 1.05


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def work_rows(rows: Iterable[dict[str, Any]]) -> Iterator[list[Any]]:
    """Kind, name, bytes, shape, whether it is causal, whether it is a backward pass, and seconds."""
    moved: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        seconds = float(f"{row.get('seconds', 0):.4g}")
        if row["kind"] == "product":
            shape = [row.get("batch", 1), row["m"], row["n"], row["k"]]
            work = product(row["dtype"], *shape, WIDTHS[row["dtype"]])
            yield ["products", row["dtype"], work.moved_bytes, shape, False, False, seconds]
        elif row["kind"] == "attention":
            shape = [row["batch"], row["heads"], row["tokens"], row["tokens"], row["head"]]
            name, _, masked = row["kernel"].partition("-")
            yield ["attention", name, 0, shape, not masked, row["what"] == "backward", seconds]
        elif row["kind"] in ("memory", "loss") and row["what"] in WAY_OF:
            if not (row.get("hot") and row["bytes"] > CACHED_BYTES):
                moved.setdefault((WAY_OF[row["what"]], row["bytes"]), []).append(row["seconds"])
        elif row["kind"] == "optimizer" and row["what"] == "adamw-fused" and row["elements"] > 1 << 26:
            moved_bytes = 7 * row["elements"] * WIDTHS[row["dtype"]]
            yield ["memory", f"fused {row['dtype']}", moved_bytes, [], False, False, seconds]
        elif row["kind"] == "transfer":
            yield ["transfer", row["what"], row["bytes"], [], False, False, seconds]
    for (way, moved_bytes), found in sorted(moved.items()):
        seconds = math.exp(statistics.fmean(map(math.log, found)))
        yield ["memory", way, moved_bytes, [], False, False, float(f"{seconds:.4g}")]


def host_rates(measured: Iterable[dict[str, Any]], rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Seconds per call: of an optimizer, a launch of AdamW over a list of small tensors; of the others, least squares.

    These are of the relative errors over the phases of the tuning steps that wait for the host. A phase's seconds are
    those of the fastest of the timed steps, since other work disturbs a host.
    """
    import numpy as np

    calls = list(Host)
    counts = []
    for row in rows:
        if row.get("set") != "tuning" or "error" in row:
            continue
        kernels = sum(seconds for _, _, seconds, device in row["kernels"] if device == "CUDA")
        if kernels > WAITING * row["step_seconds"]:
            continue
        undisturbed = min(row["step_seconds_all"]) / row["step_seconds"]
        for phase, found in calls_by_phase(account(recipe_of(row))).items():
            if phase == "optimizer":
                continue
            seconds = row["phase_seconds"][phase] * undisturbed
            counts.append([found[call] / seconds for call in calls])
    matrix = np.array(counts)
    rates = np.full(len(calls), 1e-5)
    # projected gradient steps: no rate is negative
    size = 1 / np.linalg.norm(matrix, 2) ** 2
    for _ in range(200_000):
        rates = np.maximum(rates - size * matrix.T @ (matrix @ rates - 1), 0)
    lists = [
        row["host_seconds"] / FOREACH_LAUNCHES / (row["tensors"] / TENSORS_PER_LAUNCH)
        for row in measured
        if row["kind"] == "optimizer" and row["what"] == "adamw-foreach" and row["tensors"] > 100
    ]
    found_rates = dict(zip(calls, rates, strict=True)) | {Host.OPTIMIZER: statistics.fmean(lists)}
    return {call.value: float(f"{rate:.3g}") for call, rate in found_rates.items()}


def apart_in_steps(rows: Iterable[dict[str, Any]]) -> float:
    """The kernels of tuning steps over what they take alone: the median over steps that keep the GPU busy."""
    found = []
    for row in rows:
        if row.get("set") == "tuning" and "error" not in row and row["recipe"]["batch"] * row["recipe"]["seq"] > 64:
            kernels = sum(seconds for _, _, seconds, device in row["kernels"] if device == "CUDA")
            parts = predicted_time(recipe_of(row)).parts
            # the profiler warms the GPU up
            found.append(min(kernels, row["step_seconds"]) / sum(sum(part.gpu_seconds.values()) for part in parts))
    return statistics.median(found)


def calls_by_phase(ledger: Ledger) -> dict[str, Counter[Host]]:
    found: dict[str, Counter[Host]] = {name: Counter() for name in ("forward", "backward", "optimizer")}
    for (part, call), times in ledger.calls.items():
        in_forward = part is Part.FORWARD or (part is Part.LOSS and call is not Host.BACKWARD)
        phase = "optimizer" if part is Part.OPTIMIZER else "forward" if in_forward else "backward"
        found[phase][call] += times
    return found


def recipe_of(row: dict[str, Any]) -> TrainingRecipe:
    known = {*RECIPE_OPTIONS, "model_config", "kernels"}
    values = {name: value for name, value in row["recipe"].items() if name in known}
    gpu = "h100" if "H100" in row.get("gpu", "") else "h200"
    return TrainingRecipe.from_json({**values, "device": "auto", "gpu": gpu})


def compared(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[TrainingRecipe, float, Any]]:
    """Held-out recipes with their measured seconds and predicted time, or the reason for none."""
    for row in rows:
        if row.get("set") == "tuning" or not row.get("step_seconds"):
            continue
        try:
            recipe = recipe_of(row)
            yield recipe, row["step_seconds"], predicted_time(recipe)
        except LigerprofError as error:
            yield recipe, row["step_seconds"], str(error)


def tables(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        found = list(compared(rows_of(path)))
        known = [(recipe, seconds, time) for recipe, seconds, time in found if not isinstance(time, str)]
        yield f"{path.name}: {len(known)} of {len(found)} steps have a predicted time."
        for reason, count in Counter(time for *_, time in found if isinstance(time, str)).items():
            yield f"{count} without: {reason}"
        yield ""
        yield "| recipe | measured, ms | predicted, ms | error | bound by |"
        yield "|---|---:|---:|---:|---|"
        errors: dict[bool, list[float]] = {True: [], False: []}
        for recipe, seconds, time in known:
            error = time.seconds / seconds - 1
            errors[time.bound is Bound.LAUNCHES].append(abs(error))
            cells = (f"{1000 * seconds:.1f}", f"{1000 * time.seconds:.1f}", f"{100 * error:+.1f} %", time.bound)
            yield f"| {recipe.summary} | {' | '.join(cells)} |"
        yield ""
        for launches, title in ((False, "bound by the GPU"), (True, "bound by launches")):
            of = sorted(errors[launches])
            if of:
                median, worst = 100 * statistics.median(of), 100 * of[-1]
                yield f"{len(of)} steps {title}: median error {median:.1f} %, worst {worst:.1f} %."
        right, wrong = order(known)
        yield f"Pairs of one model that differ by over 5 %: {right} of {right + wrong} in the right order."
        yield ""


def order(known: Iterable[tuple[TrainingRecipe, float, Any]]) -> tuple[int, int]:
    """Pairs with the same model whose times differ, in the right and in the wrong order, by tokens per second."""
    right = wrong = 0
    for first, second in itertools.combinations(known, 2):
        if first[0].spec.name != second[0].spec.name or first[0].spec.layers != second[0].spec.layers:
            continue
        measured = [each.tokens * each.grad_accum / seconds for each, seconds, _ in (first, second)]
        predicted = [time.tokens_per_second for *_, time in (first, second)]
        if max(measured) / min(measured) > APART:
            same = (measured[0] < measured[1]) == (predicted[0] < predicted[1])
            right, wrong = right + same, wrong + (not same)
    return right, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rates", "table"))
    parser.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()
    if given.what == "table":
        print("\n".join(tables(given.files)))
        return
    measured, steps, target = given.files
    rows = rows_of(measured)
    about = next(row for row in rows if row["kind"] == "about")
    work = ",\n".join(json.dumps(row, separators=(",", ":")) for row in work_rows(rows))
    host = json.dumps(host_rates(rows, rows_of(steps)))

    def write(apart: float) -> None:
        head = f'"about": {json.dumps(about)},\n"host": {host},\n"apart": {apart}'
        target.write_text(f'{{{head},\n"work": [\n{work}\n]}}\n')

    write(1.0)
    write(round(apart_in_steps(rows_of(steps)), 3))


if __name__ == "__main__":
    main()
