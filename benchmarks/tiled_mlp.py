"""A gated MLP in tiles of tokens at 64k tokens of an 8B's shape, against checkpointed and kept ones, in turns on a GPU.

Peaks are beyond inputs, output and gradients. `measure` requires a GPU and appends one JSON line.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint

from ligerprof.kernels.gated.tiled import tiled_gated_mlp
from ligerprof.kernels.gated.triton import swiglu_linear
from ligerprof.runs.outcome import package_versions

TOKENS, HIDDEN, INNER = 65536, 4096, 14336
GIB = 2**30


def plain(x: Tensor, g: Tensor, u: Tensor, d: Tensor) -> Tensor:
    return linear(silu(linear(x, g)) * linear(x, u), d)


def fused(x: Tensor, g: Tensor, u: Tensor, d: Tensor) -> Tensor:
    return swiglu_linear(linear(x, g), linear(x, u), d, overwrite=True)


def checkpointed(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: checkpoint(run, *inputs, use_reentrant=False)


CANDIDATES = {
    "torch": plain,
    "torch, checkpointed": checkpointed(plain),
    "ligerprof": fused,
    "ligerprof, checkpointed": checkpointed(fused),
    **{f"tiles of {tile}": functools.partial(tiled_gated_mlp, tile_tokens=tile) for tile in (4096, 8192, 16384)},
    "tiles of 8192, checkpointed": checkpointed(functools.partial(tiled_gated_mlp, tile_tokens=8192)),
}


def timed(run: Callable[[], Any]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def measure(rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    sizes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    weights = [torch.randn(size, device="cuda").mul_(size[1] ** -0.5).bfloat16() for size in sizes]
    inputs = [value.requires_grad_() for value in (x, *weights)]
    grad = torch.randn_like(x)
    calls = {
        name: functools.partial(lambda run: torch.autograd.grad(run(*inputs), inputs, grad), run)
        for name, run in CANDIDATES.items()
    }
    given_bytes = sum(value.nbytes for value in inputs)
    exact = [value.detach()[:2048].double() if value is x else value.detach().double() for value in inputs]
    truth = plain(*exact)
    rows: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        # the output, and the gradients of the inputs
        beyond = torch.cuda.max_memory_allocated() - before - given_bytes - x.nbytes
        with torch.no_grad():
            error = (CANDIDATES[name](x[:2048], *weights).double() - truth).norm() / truth.norm()
        rows[name] = {"bytes_beyond": beyond, "error": error.item(), "ms": []}
    for number in range(rounds):
        for name in calls if number % 2 == 0 else reversed(calls):
            rows[name]["ms"].append(timed(calls[name]))
    return {
        "schema": 1,
        "kind": "tiled_mlp",
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "versions": dict(package_versions()),
        "sizes": (TOKENS, HIDDEN, INNER),
        "candidates": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    row = measure(arguments.rounds)
    with arguments.results.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
    for name, one in row["candidates"].items():
        ms = statistics.median(one["ms"])
        print(f"| {name} | {ms:.1f} | {one['bytes_beyond'] / GIB:.2f} | {one['error']:.1e} |")


if __name__ == "__main__":
    main()
