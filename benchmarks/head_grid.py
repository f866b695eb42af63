"""Time the fused loss over a grid of heads, next to its peers, its three products, and a bound for each budget.

    python benchmarks/head_grid.py measure benchmarks/results/head-grid-h200.jsonl
    python benchmarks/head_grid.py table benchmarks/results/head-grid-h200.jsonl

The bound of a budget runs, in turns with the kernels, nothing but the matrix products at the token counts that the
budget forces (benchmarks/NOTES.md derives them), and one reading and writing of the logits between them at the
bandwidth of torch's elementwise kernels. `--before TREE` adds the kernels of another tree of this package: `git archive
REVISION ligerprof | tar x -C TREE`. `measure` requires a GPU and appends one JSON line per shape.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from kernel_turns import OLD, import_renamed, load_kernel
from torch import Tensor

from ligerprof.kernels.linear_cross_entropy.plan import ChunkPlan, plan_chunks
from ligerprof.kernels.options import LossOptions
from ligerprof.runs.bench.calls import BoundCall, describe_failure, make_tensors
from ligerprof.runs.bench.machine import CudaMachine
from ligerprof.runs.bench.operations import OPERATIONS, Kernel, Maker
from ligerprof.runs.bench.providers import Provided, find_provided
from ligerprof.runs.bench.session import three_products
from ligerprof.runs.bench.shapes import TINY, BenchShape
from ligerprof.runs.bench.timing import turn_order

MIB = 2**20
# tokens, hidden, vocabulary
SHAPES = (
    (16384, 2304, 256000),
    (2048, 2048, 128256),
    (8192, 2048, 151936),
    (8192, 4096, 128256),
    (4096, 2048, 128256),
    (16384, 2048, 128256),
    (8192, 3584, 152064),
    (8192, 3584, 256000),
    (4096, 4096, 32000),
    (8192, 4096, 32768),
    (6144, 3072, 128256),
    (4096, 8192, 128256),
    (1024, 2048, 128256),
)
FLOOR, BOUND, BUDGETS = "three products", "bound of", ("balanced", "lean")
PROVIDERS = ("ligerprof", "ligerprof:lean", "liger", "cce", "torch-compile", "torch-linear-ce")
PACKAGES = ("trl", "quack-kernels", "nvidia-cutlass-dsl")
# turns among ours, the products and the bounds; then among all; timed runs a turn; untimed seconds before them
ROUNDS, PEER_ROUNDS, RUNS, SETTLE_SECONDS = 6, 2, 3, 0.1
# a count is too low if something from before is freed meanwhile: autograd's thread may drop gradients late
COUNTS = 2
GOAL, GOAL_OF_BOUND = 0.94, 0.98


def trl() -> Kernel:
    """What TRL's SFTTrainer computes instead of logits: log-probabilities, entropies and right tokens, in chunks."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    outputs = ("log_probs", "entropy", "is_top1")

    def run(hidden: Tensor, weight: Tensor, labels: Tensor, _options: LossOptions) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        found = ChunkedLogProbFunction.apply(
            flat, weight, None, labels.reshape(-1), 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, outputs
        )
        return -found[0].mean()

    return run


def quack() -> Kernel:
    """QuACK's loss with the products' default tiles, since tuning takes minutes."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda hidden, weight, labels, _options: chunked_linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), tuned=False
    )


MORE_PEERS: dict[str, Callable[[], Kernel]] = {"trl": trl, "quack": quack}


def plan_of(sizes: tuple[int, int, int], budget: str) -> ChunkPlan:
    tokens, hidden, vocab = sizes
    return plan_chunks(tokens=tokens, hidden=hidden, vocab=vocab, element_bytes=2, budget=budget, gradient_bytes=2)


def bound(plan: ChunkPlan, hidden: Tensor, weight: Tensor) -> Callable[[], None]:
    """The plan's products, over whole rows, and one reading and writing of each chunk's logits."""
    hidden, weight = hidden.detach(), weight.detach()
    tokens, scratch = hidden.shape[0], plan.scratch_tokens
    largest = max(scratch, plan.chunk_tokens, plan.recomputed_tokens if plan.recomputed else 0)
    logits = torch.empty(min(largest, tokens), weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    hidden_gradient, weight_gradient = torch.empty_like(hidden), torch.empty_like(weight)

    def slices(start: int, size: int) -> Iterator[slice]:
        for first in range(start, tokens, size or tokens):
            yield slice(first, min(first + size, tokens))

    def part(chunk: slice, *, states: bool = True, head: bool = True) -> None:
        rows = logits[: chunk.stop - chunk.start]
        torch.mm(hidden[chunk], weight.t(), out=rows)
        rows.mul_(1.0)
        if states:
            torch.mm(rows, weight, out=hidden_gradient[chunk])
        if head and chunk.start == 0:
            torch.mm(rows.t(), hidden[chunk], out=weight_gradient)
        elif head:
            torch.addmm(weight_gradient, rows.t(), hidden[chunk], out=weight_gradient)

    def run() -> None:
        if plan.recomputed:
            for chunk in slices(scratch, plan.chunk_tokens):
                part(chunk, head=False)
        if scratch:
            part(slice(0, scratch))
        again = plan.recomputed_tokens if plan.recomputed else plan.chunk_tokens
        for chunk in slices(scratch, again):
            part(chunk, states=not plan.recomputed)

    return run


def bench_shape(sizes: tuple[int, int, int]) -> BenchShape:
    tokens, hidden, vocab = sizes
    return dataclasses.replace(TINY, name="grid", sequences=1, seq_len=tokens, hidden=hidden, vocab=vocab)


def find_all(only: Collection[str], *, before: bool) -> tuple[list[Provided], dict[str, str]]:
    found, without = find_provided("flce", [name for name in PROVIDERS if name in only], "cuda")
    missing = dict(without)
    for name, make in MORE_PEERS.items():
        if name not in only:
            continue
        try:
            found.append(Provided(name=name, kernel=make(), options=LossOptions()))
        except Exception as error:  # a package that is not there, or does not work with this torch
            missing[name] = describe_failure(error)
    if before:
        for budget in BUDGETS:
            old = load_kernel(OLD, "flce", budget)
            found.append(dataclasses.replace(old, name=f"before:{budget}"))
    return found, missing


def in_turns(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each candidate; see `ligerprof.runs.bench.timing`, which also warms up more than there is time for.

    The timed runs follow an untimed one without a pause, so that the host is ahead, as in a training step.
    """
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for index in turn_order(len(names), number):
            run = runs[names[index]]
            started = time.perf_counter()
            while time.perf_counter() - started < SETTLE_SECONDS:
                run()
                torch.cuda.synchronize()
            run()
            events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(RUNS)]
            for start, stop in events:
                start.record()
                run()
                stop.record()
            torch.cuda.synchronize()
            seconds[names[index]] += [start.elapsed_time(stop) / 1e3 for start, stop in events]
    return seconds


def measure_shape(
    sizes: tuple[int, int, int], machine: CudaMachine, only: Collection[str], *, before: bool, rounds: int
) -> dict[str, Any]:
    operation, shape = OPERATIONS["flce"], bench_shape(sizes)
    generator = torch.Generator(machine.device).manual_seed(0)
    tensors = make_tensors(operation, shape, Maker(dtype=torch.bfloat16, generator=generator))
    providers, missing = find_all(only, before=before)
    runs: dict[str, Callable[[], object]] = {}
    peaks: dict[str, int] = {}
    for provided in providers:
        call = BoundCall(operation, provided, tensors)
        try:
            call.full()
            peaks[provided.name] = max(machine.extra_peak_bytes(call.full) for _ in range(COUNTS))
        except Exception as error:  # other providers' kernels may raise anything; the rest still count
            missing[provided.name] = describe_failure(error)
            machine.release()
            continue
        runs[provided.name] = call.full
    hidden, weight = tensors.inputs["hidden"].view(-1, sizes[1]), tensors.inputs["weight"]
    runs[FLOOR] = three_products(hidden, weight)
    for budget in BUDGETS:
        runs[f"{BOUND} {budget}"] = bound(plan_of(sizes, budget), hidden, weight)
    # a chip that waited for memory in one turn is a twentieth faster in the next: only work of about the same power is
    # compared with a bound
    own = {name: run for name, run in runs.items() if budget_of(name) or name == FLOOR or name.startswith(BOUND)}
    own_times = in_turns(own, rounds)
    times = in_turns(runs, PEER_ROUNDS) if len(runs) > len(own) else own_times
    return {
        "schema": 1,
        "kind": "head_grid",
        **machine.environment(),
        **versions(),
        **dict(zip(("tokens", "hidden", "vocab"), sizes, strict=True)),
        "gradient_bytes": 2 * sizes[1] * (sizes[0] + sizes[2]),
        "seconds": times,
        "own_seconds": own_times,
        "extra_peak_bytes": peaks,
        "missing": missing,
    }


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def measure(
    results: Path, *, shapes: slice, seconds: float, before: Path | None, rounds: int, only: Collection[str]
) -> None:
    if before is not None:
        import_renamed(before)
    machine = CudaMachine()
    results.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for sizes in SHAPES[shapes]:
        name = " x ".join(map(str, sizes))
        if time.monotonic() - started > seconds:
            print(f"{name}: not started within {seconds:g} s", file=sys.stderr)
            continue
        begun = time.monotonic()
        try:
            row = measure_shape(sizes, machine, only, before=before is not None, rounds=rounds)
        except Exception as error:  # the other shapes still count
            print(f"{name}: {describe_failure(error)}", file=sys.stderr, flush=True)
            continue
        finally:
            machine.release()
        with results.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print(f"{name}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)


def table_rows(results: Path) -> Iterator[str]:
    """One row per shape: each candidate's share of the products' speed, of its bound's in brackets, and its memory."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    peers = dict.fromkeys(name for row in rows for name in row["extra_peak_bytes"])
    yield f"| tokens x hidden x vocabulary | products, ms | {' | '.join(peers)} |"
    yield f"|---|---:|{'---|' * len(peers)}"
    for row in rows:
        cells = [_cell(name, row) for name in peers]
        yield f"| {sizes_of(row)} | {1e3 * own_medians(row)[FLOOR]:.2f} | {' | '.join(cells)} |"
    reasons = dict.fromkeys((name, reason) for row in rows for name, reason in row["missing"].items())
    for name, reason in reasons:
        where = [sizes_of(row) for row in rows if row["missing"].get(name) == reason]
        yield f"{name}: {reason} ({'all shapes' if len(where) == len(rows) else ', '.join(where)})"
    for row in rows:
        yield from goal_lines(sizes_of(row), row)


def medians_of(row: dict[str, Any]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in row["seconds"].items()}


def own_medians(row: dict[str, Any]) -> dict[str, float]:
    """Medians in the turns without peers, which the first files did not have."""
    return {name: statistics.median(values) for name, values in row.get("own_seconds", row["seconds"]).items()}


def sizes_of(row: dict[str, Any]) -> str:
    return f"{row['tokens']} x {row['hidden']} x {row['vocab']}"


def _cell(name: str, row: dict[str, Any]) -> str:
    medians = medians_of(row) if budget_of(name) is None else own_medians(row)
    if name not in medians:
        return "-"
    bound_seconds = medians.get(f"{BOUND} {budget_of(name)}")
    of_bound = "" if bound_seconds is None else f" ({bound_seconds / medians[name]:.2f})"
    return f"{medians[FLOOR] / medians[name]:.2f}{of_bound}, {row['extra_peak_bytes'][name] / MIB:,.0f} MiB"


def budget_of(name: str) -> str | None:
    """The budget of a candidate of ligerprof's."""
    provider, _, budget = name.partition(":")
    return (budget or "balanced") if provider in ("ligerprof", "before") else None


def goal_lines(sizes: str, row: dict[str, Any]) -> Iterator[str]:
    peaks, medians = row["extra_peak_bytes"], own_medians(row)
    if "ligerprof" not in peaks:
        return
    share, of_bound = medians[FLOOR] / medians["ligerprof"], medians[f"{BOUND} balanced"] / medians["ligerprof"]
    beyond_mib = (peaks["ligerprof"] - row["gradient_bytes"]) / MIB
    met = (share >= GOAL or of_bound >= GOAL_OF_BOUND) and beyond_mib <= 256
    yield (
        f"goal {'met' if met else 'MISSED'}: {sizes} balanced: {share:.3f} >= {GOAL} or {of_bound:.3f} >="
        f" {GOAL_OF_BOUND}, {beyond_mib:.1f} MiB beyond the gradients <= 256"
    )
    if "liger" in peaks:
        medians = medians_of(row)
        faster, more_bytes = medians["liger"] / medians["ligerprof:lean"], peaks["ligerprof:lean"] - peaks["liger"]
        met = faster >= 1 and more_bytes <= 0
        yield f"goal {'met' if met else 'MISSED'}: {sizes} lean: {faster:.3f} times liger, {more_bytes:+,} bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--shapes", default=f"0:{len(SHAPES)}", help="the shapes with these numbers, FIRST:AFTER_LAST")
    parser.add_argument("--seconds", type=float, default=400.0, help="start no shape after this time")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"turns of ours and the bounds, {PEER_ROUNDS} of peers"
    )
    everyone = ",".join((*PROVIDERS, *MORE_PEERS))
    parser.add_argument("--only", default=everyone, help=f"these candidates, joined by commas (default: {everyone})")
    parser.add_argument("--before", type=Path, help="folder that holds another tree's ligerprof/")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        chosen = slice(*(int(word) for word in arguments.shapes.split(":")))
        options = {"seconds": arguments.seconds, "before": arguments.before, "rounds": arguments.rounds}
        measure(arguments.results, shapes=chosen, only=arguments.only.split(","), **options)
    for row in table_rows(arguments.results):
        print(row)


if __name__ == "__main__":
    main()
