"""Find where the fused loss loses time against its bound: in row kernels, in products over blocks, or between kernels.

    python benchmarks/head_parts.py parts benchmarks/results/head-parts-h200.jsonl --shapes 1,4,10
    python benchmarks/head_parts.py widths benchmarks/results/head-widths-h200.jsonl --shapes 1,4,10

`parts` compares with the bound of `head_grid.py`, in its turns: the loss; the loss with torch's elementwise kernel in
the place of the row kernels; and the products alone in the plan's blocks, with one reading and writing of the logits,
also for the first blocks of `--first` words. `widths` times each product of a block alone, by the words of the block.
Requires a GPU; appends one JSON line per shape and candidate, or per width and product.
"""

import argparse
import dataclasses
import json
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from head_grid import BOUND, FLOOR, SHAPES, bench_shape, bound, plan_of
from torch import Tensor
from turns import Contest, Turns, compare_in_turns, median_interval

from ligerprof.kernels.linear_cross_entropy import chunks
from ligerprof.kernels.linear_cross_entropy.plan import BALANCED_BYTES, ChunkPlan, aligned
from ligerprof.runs.bench.accuracy import BoundCall, make_tensors
from ligerprof.runs.bench.operations import OPERATIONS, Maker, find_provided
from ligerprof.runs.bench.session import CudaClock, CudaMachine, three_products

Run = Callable[[], object]
TURNS = Turns(rounds=6)
# words between two widths, widths that are tried up to the largest, and rounds, of which the first does not count
STEP, WIDTHS, ROUNDS = 128, 48, 4


def blocks_of(sizes: tuple[int, ...], tokens: int, first: Tensor, head_VD: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Each block's words, and its logits [tokens, words]: see `chunks._Scratch`."""
    memory, start = first.view(-1), 0
    for size in sizes:
        yield slice(start, start + size), memory[: tokens * aligned(size)].view(tokens, -1)[:, :size]
        memory, start = head_VD[start : start + size].view(-1), start + size


def products_in_blocks(plan: ChunkPlan, hidden: Tensor, weight: Tensor) -> Run:
    """The products of a plan as the loss computes them, and one reading and writing of the logits."""
    hidden, weight = hidden.detach(), weight.detach()
    (tokens, columns), scratch = hidden.shape, plan.scratch_tokens
    workspace = torch.empty(plan.workspace_bytes // hidden.itemsize, dtype=hidden.dtype, device=hidden.device)
    hidden_gradient, weight_gradient = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        if scratch:
            states = hidden[:scratch]
            blocks = list(blocks_of(plan.blocks, scratch, workspace, weight_gradient))
            for words, logits in blocks:
                torch.mm(states, weight[words].t(), out=logits)
            for _, logits in blocks:
                logits.mul_(1.0)
            last = weight_gradient[blocks[-1][0]].view(-1)
            total = last[: 2 * scratch * columns].view(torch.float32).view(scratch, columns)
            for words, logits in blocks:
                chunks.product_into(total, logits, weight[words], accumulate=words.start > 0)
            hidden_gradient[:scratch].copy_(total)
            for words, logits in reversed(blocks):
                torch.mm(logits.t(), states, out=weight_gradient[words])
        for chunk in chunks._later_chunks(plan, tokens):
            rows = chunk.stop - chunk.start
            logits = workspace[: rows * plan.row_elements].view(rows, -1)[:, : weight.shape[0]]
            torch.mm(hidden[chunk], weight.t(), out=logits)
            logits.mul_(1.0)
            torch.mm(logits, weight, out=hidden_gradient[chunk])
            chunks.product_into(weight_gradient, logits.t(), hidden[chunk], accumulate=chunk.start > 0)

    return run


def with_elementwise_rows(call: Run) -> Run:
    """The loss with an elementwise kernel in the place of its row kernels; its results are wrong."""

    def rows(_arguments: Any, logits: Tensor, _grad: Any, **_: Any) -> None:
        logits.mul_(1.0)

    def rows_of_blocks(_arguments: Any, first: Tensor, head: Tensor, sizes: tuple[int, ...], **named: Any) -> None:
        head_VD = head.view(-1, named["word_elements"])
        for _, logits in blocks_of(sizes, first.shape[0], first, head_VD):
            logits.mul_(1.0)

    def run() -> None:
        own = chunks.loss_and_gradient, chunks.loss_and_gradient_of_blocks
        chunks.loss_and_gradient, chunks.loss_and_gradient_of_blocks = rows, rows_of_blocks
        try:
            call()
        finally:
            chunks.loss_and_gradient, chunks.loss_and_gradient_of_blocks = own

    return run


def with_first_blocks(plan: ChunkPlan, words: int) -> ChunkPlan:
    """The plan with blocks of this many words, and a last block of the rest."""
    vocab = sum(plan.blocks)
    full = (vocab - 1) // words
    return dataclasses.replace(plan, blocks=(*[words] * full, vocab - full * words), workspace_bytes=BALANCED_BYTES)


def parts(sizes: tuple[int, int, int], firsts: list[int]) -> Iterator[dict[str, Any]]:
    machine, operation = CudaMachine(), OPERATIONS["flce"]
    generator = torch.Generator(machine.device).manual_seed(0)
    tensors = make_tensors(operation, bench_shape(sizes), Maker(dtype=torch.bfloat16, generator=generator))
    (ours,), _ = find_provided("flce", ["ligerprof"], "cuda")
    call, plan = BoundCall(operation, ours, tensors).full, plan_of(sizes, "balanced")
    hidden, weight = tensors.inputs["hidden"].view(-1, sizes[1]), tensors.inputs["weight"]
    candidates = {
        "loss": call,
        "with elementwise rows": with_elementwise_rows(call),
        "products in blocks": products_in_blocks(plan, hidden, weight),
    }
    for first in firsts if plan.blocks else ():
        tried = with_first_blocks(plan, first)
        candidates[f"in blocks of {first}"] = products_in_blocks(tried, hidden, weight)
    references = {FLOOR: three_products(hidden, weight), BOUND: bound(plan, hidden, weight)}
    contests = [Contest(name=name, run=run, references=tuple(references)) for name, run in candidates.items()]
    found = compare_in_turns(contests, references, CudaClock(flush=False), TURNS, machine.conditions)
    for name, one in found.items():
        shares = {of: dataclasses.asdict(median_interval(values)) for of, values in one.shares.items()}
        yield {**machine.environment(), "name": name, "seconds": statistics.median(one.seconds), "shares": shares}
    machine.release()


def widths(sizes: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    machine, plan = CudaMachine(), plan_of(sizes, "balanced")
    tokens, columns = plan.scratch_tokens, sizes[1]
    if not tokens:
        return
    largest = BALANCED_BYTES // (2 * tokens) // STEP * STEP
    tried = [largest - STEP * number for number in range(WIDTHS) if largest > STEP * number]
    new: dict[str, Any] = {"device": machine.device, "dtype": torch.bfloat16}
    hidden, weight = torch.randn(tokens, columns, **new), 0.02 * torch.randn(largest, columns, **new)
    memory, weight_gradient = torch.randn(tokens * largest, **new), torch.empty_like(weight)
    total = torch.zeros(tokens, columns, device=machine.device)
    clock, seconds = CudaClock(flush=False), {}

    def products(words: int) -> dict[str, Run]:
        logits = memory[: tokens * words].view(tokens, words)
        return {
            "logits": lambda: torch.mm(hidden, weight[:words].t(), out=logits),
            "hidden states": lambda: chunks.product_into(total, logits, weight[:words], accumulate=True),
            "head": lambda: torch.mm(logits.t(), hidden, out=weight_gradient[:words]),
        }

    for number in range(ROUNDS):
        order = random.sample(tried, len(tried))
        runs = [((words, name), run) for words in order for name, run in products(words).items()]
        pending = [(key, clock.time(run, head_start=False)) for key, run in runs]
        for key, read in pending if number else ():
            seconds.setdefault(key, []).append(read())
        torch.cuda.synchronize()
    for (words, name), values in seconds.items():
        yield {**machine.environment(), "words": words, "product": name, "seconds": statistics.median(values)}
    machine.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("parts", "widths"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--shapes", default="1,4,10", help="numbers of shapes of head_grid.py, joined by commas")
    parser.add_argument("--first", default="", help="words of the first blocks to try, joined by commas")
    arguments = parser.parse_args()
    firsts = [int(word) for word in arguments.first.split(",") if word]
    for number in map(int, arguments.shapes.split(",")):
        sizes = SHAPES[number]
        of_shape = dict(zip(("tokens", "hidden", "vocab"), sizes, strict=True))
        for row in parts(sizes, firsts) if arguments.what == "parts" else widths(sizes):
            with arguments.results.open("a") as lines:
                lines.write(json.dumps({"kind": arguments.what, **of_shape, **row}) + "\n")
            print(
                of_shape,
                {name: value for name, value in row.items() if name in ("name", "words", "product", "seconds")},
            )


if __name__ == "__main__":
    main()
