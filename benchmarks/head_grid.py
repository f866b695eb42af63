"""Time the fused loss over a grid of heads, next to its peers, its three products, and a bound for each budget.

    python benchmarks/head_grid.py measure benchmarks/results/head-grid-h200.jsonl
    python benchmarks/head_grid.py table benchmarks/results/head-grid-h200.jsonl

Each run of a candidate is compared with the products (and ours with the bound of its budget, too) right before and
after it, so that all have the same clock; see `ligerprof.runs.bench.accuracy`. Intervals are of the median over turns.
The bound of a budget runs nothing but the matrix products at the token counts that the budget forces
(benchmarks/NOTES.md derives them), and one reading and writing of the logits between them at the bandwidth of torch's
elementwise kernels. `--before TREE` adds the kernels of another tree of this package: `git archive
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
from turns import Contest, TimeComparison, Turns, compare_in_turns, median_interval

from ligerprof.kernels.linear_cross_entropy.plan import ChunkPlan, plan_chunks
from ligerprof.kernels.options import LossOptions
from ligerprof.runs.bench.accuracy import BoundCall, describe_failure, make_tensors
from ligerprof.runs.bench.operations import OPERATIONS, Kernel, Maker, Provided, find_provided
from ligerprof.runs.bench.records import TINY, BenchShape
from ligerprof.runs.bench.session import CudaClock, CudaMachine, three_products

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
PROVIDERS = ("ligerprof", "ligerprof:lean", "torch", "torch-compile", "torch-linear-ce", "liger", "cce")
# ours with as much memory as this peer takes
ALIKE, LIKE = "ligerprof, as", "quack"
PACKAGES = ("trl", "quack-kernels", "nvidia-cutlass-dsl")
OWN_TURNS, PEER_TURNS = Turns(rounds=6), Turns(rounds=4)
# a count is too low if something from before is freed meanwhile: autograd's thread may drop gradients late
COUNTS = 2
# what the allocator may not split of a large block
UNSPLIT_BYTES = 2 * MIB
BUDGETS_OF_NAMES = {"ligerprof": "balanced", "ligerprof:lean": "lean"}
CONDITIONS = ("sm_clock_mhz", "power_watts")
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


def measure_shape(
    sizes: tuple[int, int, int], machine: CudaMachine, only: Collection[str], *, before: bool, rounds: int
) -> dict[str, Any]:
    operation, shape = OPERATIONS["flce"], bench_shape(sizes)
    generator = torch.Generator(machine.device).manual_seed(0)
    tensors = make_tensors(operation, shape, Maker(dtype=torch.bfloat16, generator=generator))
    providers, missing = find_all(only, before=before)
    contests: list[Contest] = []
    peaks: dict[str, int] = {}

    def enter(provided: Provided) -> None:
        call = BoundCall(operation, provided, tensors)
        try:
            call.full()
            counts = 1 if budget_of(provided.name) is None else COUNTS
            peaks[provided.name] = max(machine.extra_peak_bytes(call.full) for _ in range(counts))
        except Exception as error:  # other providers' kernels may raise anything; the rest still count
            missing[provided.name] = describe_failure(error)
            machine.release()
            return
        contests.append(Contest(name=provided.name, run=call.full, references=references_of(provided.name)))

    for provided in providers:
        enter(provided)
    gradient_bytes = 2 * sizes[1] * (sizes[0] + sizes[2])
    if LIKE in peaks:
        budget = peaks[LIKE] - gradient_bytes - UNSPLIT_BYTES
        options = LossOptions(in_place=True, budget=budget)
        (ours,), _ = find_provided("flce", ["ligerprof"], "cuda")
        enter(dataclasses.replace(ours, name=f"{ALIKE} {LIKE}", options=options))
    hidden, weight = tensors.inputs["hidden"].view(-1, sizes[1]), tensors.inputs["weight"]
    references: dict[str, Callable[[], object]] = {FLOOR: three_products(hidden, weight)}
    for budget in BUDGETS:
        references[f"{BOUND} {budget}"] = bound(plan_of(sizes, budget), hidden, weight)
    clock = CudaClock(flush=False)
    found: dict[str, TimeComparison] = {}
    for turns, own in ((dataclasses.replace(OWN_TURNS, rounds=rounds), True), (PEER_TURNS, False)):
        group = [contest for contest in contests if (budget_of(contest.name) == BUDGETS[0]) == own]
        found |= compare_in_turns(group, references, clock, turns, machine.conditions)
    return {
        "schema": 2,
        "kind": "head_grid",
        **machine.environment(),
        **versions(),
        **dict(zip(("tokens", "hidden", "vocab"), sizes, strict=True)),
        "gradient_bytes": gradient_bytes,
        "comparisons": {name: dataclasses.asdict(one) for name, one in found.items()},
        "extra_peak_bytes": peaks,
        "missing": missing,
    }


def references_of(name: str) -> tuple[str, ...]:
    budget = budget_of(name)
    return (FLOOR,) if budget is None else (FLOOR, f"{BOUND} {budget}")


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def measure(
    results: Path,
    *,
    shapes: Collection[tuple[int, int, int]],
    seconds: float,
    before: Path | None,
    rounds: int,
    only: Collection[str],
) -> None:
    if before is not None:
        import_renamed(before)
    machine = CudaMachine()
    results.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for sizes in shapes:
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


def load(results: Path) -> list[dict[str, Any]]:
    """The newest row of each shape, in the order of the grid."""
    rows = {sizes_of(row): row for row in map(json.loads, results.read_text().splitlines())}
    return [rows[name] for name in (" x ".join(map(str, sizes)) for sizes in SHAPES) if name in rows]


def table_rows(results: Path) -> Iterator[str]:
    """Ours against the products and the bounds, then everyone's share of the products' speed and memory."""
    rows = load(results)
    yield from own_table(rows)
    yield ""
    names = dict.fromkeys(name for row in rows for name in row["comparisons"] if name not in BUDGETS_OF_NAMES)
    peers = [*BUDGETS_OF_NAMES, *names]
    yield f"| tokens x hidden x vocabulary | {' | '.join(peers)} |"
    yield f"|---|{'---|' * len(peers)}"
    for row in rows:
        yield f"| {sizes_of(row)} | {' | '.join(_cell(name, row) for name in peers)} |"
    reasons = dict.fromkeys((name, reason) for row in rows for name, reason in row["missing"].items())
    for name, reason in reasons:
        where = [sizes_of(row) for row in rows if row["missing"].get(name) == reason]
        yield f"without {name}{'' if len(where) == len(rows) else ' at ' + ', '.join(where)}: {reason}"
    for row in rows:
        yield from goal_lines(row)


def own_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    before = {f"before:{budget}": f"{budget} before" for budget in BUDGETS}
    titles = {**BUDGETS_OF_NAMES, **{name: title for name, title in before.items() if name in rows[0]["comparisons"]}}
    columns = [
        f"{title}: {of}" for title in titles.values() for of in ("of products", "of bound", "MiB beyond gradients")
    ]
    yield f"| tokens x hidden x vocabulary | products, ms | SM clock, MHz | W | {' | '.join(columns)} |"
    yield f"|---|---:|---|---|{'---|' * len(columns)}"
    for row in rows:
        found = [row["comparisons"][name] for name in titles if name in row["comparisons"]]
        floor = [seconds for one in found for seconds in one["reference_seconds"][FLOOR]]
        cells = [f"{1e3 * statistics.median(floor):.2f}", *(_conditions(found, key) for key in CONDITIONS)]
        for name in titles:
            if name not in row["comparisons"]:
                cells += ["-"] * 3
                continue
            beyond_mib = (row["extra_peak_bytes"][name] - row["gradient_bytes"]) / MIB
            references = (FLOOR, f"{BOUND} {budget_of(name)}")
            cells += [_share(row, name, of) for of in references] + [f"{beyond_mib:.1f}"]
        yield f"| {sizes_of(row)} | {' | '.join(cells)} |"


def _conditions(comparisons: list[dict[str, Any]], key: str) -> str:
    """The median over all turns, and the range."""
    values = [seen[key] for one in comparisons for seen in one["conditions"] if key in seen]
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})" if values else "-"


def _share(row: dict[str, Any], name: str, reference: str) -> str:
    found = median_interval(row["comparisons"][name]["shares"][reference])
    return f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})"


def _cell(name: str, row: dict[str, Any]) -> str:
    if name not in row["comparisons"]:
        return "-"
    found = median_interval(row["comparisons"][name]["shares"][FLOOR])
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f}), {row['extra_peak_bytes'][name] / MIB:,.0f} MiB"


def sizes_of(row: dict[str, Any]) -> str:
    return f"{row['tokens']} x {row['hidden']} x {row['vocab']}"


def budget_of(name: str) -> str | None:
    """The budget of a candidate of ligerprof's; None for peers, and for ours with a peer's memory."""
    provider, _, budget = name.partition(":")
    return (budget or "balanced") if provider in ("ligerprof", "before") else None


def goal_lines(row: dict[str, Any]) -> Iterator[str]:
    sizes, peaks, comparisons = sizes_of(row), row["extra_peak_bytes"], row["comparisons"]
    if "ligerprof" not in comparisons:
        return
    share, of_bound = (median_interval(comparisons["ligerprof"]["shares"][of]) for of in (FLOOR, f"{BOUND} balanced"))
    beyond_mib = (peaks["ligerprof"] - row["gradient_bytes"]) / MIB
    met = (share.median >= GOAL or of_bound.median >= GOAL_OF_BOUND) and beyond_mib <= 256
    yield (
        f"goal {'met' if met else 'MISSED'}: {sizes} balanced: {share.median:.3f} >= {GOAL} or {of_bound.median:.3f}"
        f" ({of_bound.low:.3f} to {of_bound.high:.3f}, {of_bound.confidence:.0%}) >= {GOAL_OF_BOUND},"
        f" {beyond_mib:.1f} MiB beyond the gradients <= 256"
    )
    if "liger" in comparisons and "ligerprof:lean" in comparisons:
        lean, liger = (statistics.median(comparisons[name]["shares"][FLOOR]) for name in ("ligerprof:lean", "liger"))
        more_bytes = peaks["ligerprof:lean"] - peaks["liger"]
        met = lean >= liger and more_bytes <= 0
        yield f"goal {'met' if met else 'MISSED'}: {sizes} lean: {lean / liger:.3f} times liger, {more_bytes:+,} bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("results", type=Path)
    parser.add_argument(
        "--shapes", default=",".join(map(str, range(len(SHAPES)))), help="numbers of shapes, joined by commas"
    )
    parser.add_argument("--seconds", type=float, default=400.0, help="start no shape after this time")
    parser.add_argument(
        "--rounds",
        type=int,
        default=OWN_TURNS.rounds,
        help=f"turns of the default budget, {PEER_TURNS.rounds} of the others",
    )
    everyone = ",".join((*PROVIDERS, *MORE_PEERS))
    parser.add_argument("--only", default=everyone, help=f"these candidates, joined by commas (default: {everyone})")
    parser.add_argument("--before", type=Path, help="folder that holds another tree's ligerprof/")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        chosen = [SHAPES[int(word)] for word in arguments.shapes.split(",")]
        options = {"seconds": arguments.seconds, "before": arguments.before, "rounds": arguments.rounds}
        measure(arguments.results, shapes=chosen, only=arguments.only.split(","), **options)
    for row in table_rows(arguments.results):
        print(row)


if __name__ == "__main__":
    main()
