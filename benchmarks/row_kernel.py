"""Time the row kernel of the fused loss against that of another tree of this package, and compare both with fp64.

    git archive REVISION ligerprof | tar x -C /tmp/before
    python benchmarks/row_kernel.py /tmp/before benchmarks/results/row-kernel-h200.jsonl

Each launch follows a product that writes its logits, as in the loss, so that the chip has the clock and the heat that
it has there; an elementwise kernel, which reads and writes the logits once, takes turns with the two. Appends one JSON
line per vocabulary and tree (errors), and one per size: `us`, the median of 24 launches, and `clock`, MHz, at the
end of each round. Requires a GPU.
"""

import argparse
import importlib
import json
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kernel_turns import NEW, OLD, import_renamed

TREES = {"before": OLD, "now": NEW}
ERROR_TOKENS, ERROR_WORDS = 300, (128256, 256000)
SIZES = ((128256, 1024), (128256, 512), (151936, 768), (152064, 768), (256000, 512))
HIDDEN = 4096
# of which the first is not counted; each begins with products that bring the chip to their clock
ROUNDS, LAUNCHES, WARMING_PRODUCTS = 7, 4, 100


def row_kernel(package: str) -> Callable[..., None]:
    """A tree's row kernel: writes losses, and the gradient over the logits."""
    rows, arguments = (
        importlib.import_module(f"{package}.kernels.cross_entropy.{name}") for name in ("rows", "arguments")
    )
    options = importlib.import_module(f"{package}.kernels.options").PLAIN_LOSS

    def run(logits: Any, labels: Any, loss: Any, scale: Any) -> None:
        words = logits.shape[1]
        shared = {"seq_len": len(labels), "vocab": words, "words": words, "options": options, "scale": scale}
        rows.loss_and_gradient(arguments.LossArguments(labels_N=labels, loss_N=loss, **shared), logits, logits)

    return run


def errors(run: Callable[..., None], words: int) -> dict[str, float]:
    """Largest error of a loss, and the relative error of the gradient, both against fp64."""
    import torch

    torch.manual_seed(1)
    logits = (2.5 * torch.randn(ERROR_TOKENS, words, device="cuda")).bfloat16()
    labels = torch.randint(words, (ERROR_TOKENS,), device="cuda")
    labels[5::7] = -100
    loss, scale = torch.empty(ERROR_TOKENS, device="cuda"), torch.full((1,), 1 / ERROR_TOKENS, device="cuda")
    gradient = logits.clone()
    run(gradient, labels, loss, scale)
    largest = difference = size = 0.0
    for part in torch.arange(ERROR_TOKENS, device="cuda").split(25):
        exact = logits[part].double().requires_grad_()
        losses = torch.nn.functional.cross_entropy(exact, labels[part], reduction="none")
        (right,) = torch.autograd.grad(losses.sum() / ERROR_TOKENS, exact)
        largest = max(largest, (loss[part] - losses).abs().max().item())
        difference += (gradient[part] - right).square().sum().item()
        size += right.square().sum().item()
    return {"loss": largest, "gradient": (difference / size) ** 0.5}


def times(runs: dict[str, Callable[..., None]], words: int, tokens: int) -> dict[str, Any]:
    """Median microseconds of a launch by candidate, and the clock of each round."""
    import torch

    from ligerprof.runs.bench.session import CudaClock, CudaMachine

    new = {"device": "cuda", "dtype": torch.bfloat16}
    hidden, weight = torch.randn(tokens, HIDDEN, **new), 0.02 * torch.randn(words, HIDDEN, **new)
    logits, labels = torch.empty(tokens, words, **new), torch.randint(words, (tokens,), device="cuda")
    loss, scale = torch.empty(tokens, device="cuda"), torch.full((1,), 1 / tokens, device="cuda")

    def candidate(run: Callable[..., None]) -> Callable[[], None]:
        return lambda: run(logits, labels, loss, scale)

    candidates: dict[str, Callable[[], Any]] = {name: candidate(run) for name, run in runs.items()}
    candidates["elementwise"] = lambda: logits.mul_(1.0)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    machine, clock, conditions = CudaMachine(), CudaClock(flush=False), []
    for number in range(ROUNDS):
        for _ in range(WARMING_PRODUCTS):
            torch.mm(hidden, weight.t(), out=logits)
        pending = []
        for name in random.sample(list(candidates), len(candidates)):
            for _ in range(LAUNCHES):
                torch.mm(hidden, weight.t(), out=logits)
                pending.append((name, clock.time(candidates[name], head_start=False)))
        conditions.append(machine.conditions())
        for name, read in pending if number else ():
            seconds[name].append(read())
        torch.cuda.synchronize()
    return {
        "us": {name: round(1e6 * statistics.median(values), 1) for name, values in seconds.items()},
        "clock": [one.get("sm_clock_mhz") for one in conditions],
    }


def measure() -> Iterator[dict[str, Any]]:
    runs = {name: row_kernel(package) for name, package in TREES.items()}
    for words in ERROR_WORDS:
        for name, run in runs.items():
            yield {"kind": "errors", "name": name, "V": words, **errors(run, words)}
    for words, tokens in SIZES:
        yield {"kind": "micro", "V": words, "C": tokens, **times(runs, words, tokens)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder that holds the other tree's ligerprof/")
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    import_renamed(arguments.before)
    for row in measure():
        with arguments.results.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print(row, flush=True)


if __name__ == "__main__":
    main()
