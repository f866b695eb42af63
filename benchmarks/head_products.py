"""Time what the fused loss consists of, apart: its products by chunk size, its row kernel, ways to add up the head.

    python benchmarks/head_products.py benchmarks/results/head-products-h200.jsonl

Requires a GPU and half a minute; appends JSON lines, times in microseconds. Each candidate runs for 60 ms, and is then
timed for 60 ms. benchmarks/NOTES.md draws conclusions.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligerprof.kernels.cross_entropy.arguments import LossArguments
from ligerprof.kernels.cross_entropy.rows import loss_and_gradient
from ligerprof.kernels.options import PLAIN_LOSS
from ligerprof.runs.bench.accuracy import describe_failure
from ligerprof.runs.bench.session import CudaMachine

SECONDS = 0.06
# hidden, vocabulary, tokens of a chunk
PRODUCTS = (
    (2304, 256000, (512, 768, 1024, 2048)),
    (2048, 128256, (512, 768, 1024, 2048)),
    (4096, 128256, (512, 768, 1024, 2048)),
    (2048, 151936, (512, 768, 880, 1024)),
)
LIBRARIES = ("default", "cublaslt")
SUMS = ((2304, 256000, 512), (2048, 128256, 1024))
# words, hidden elements and tokens of a tile, warps, stages, programs per multiprocessor, stores, flattened loop
TILINGS = (
    (128, 256, 64, 8, 3, 1, 2, True),
    (128, 256, 64, 8, 3, 1, 2, False),
    (128, 128, 64, 4, 3, 2, 2, True),
    (128, 128, 64, 4, 3, 2, 2, False),
    (128, 128, 64, 8, 3, 2, 2, False),
    (128, 128, 32, 4, 5, 2, 1, False),
    (64, 256, 64, 4, 2, 2, 2, False),
    (256, 128, 64, 8, 3, 1, 1, True),
)


def timed(run: Callable[[], object]) -> float:
    """Microseconds of one run, after a warm-up."""
    run()
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    run()
    ended.record()
    ended.synchronize()
    count = int(1e3 * SECONDS / max(started.elapsed_time(ended), 0.02)) + 2
    for _ in range(count):
        run()
    started.record()
    for _ in range(count):
        run()
    ended.record()
    ended.synchronize()
    return float(started.elapsed_time(ended)) / count * 1e3


def normal(*sizes: int, std: float = 1.0) -> Tensor:
    return torch.empty(*sizes, device="cuda", dtype=torch.bfloat16).normal_(0, std)


def products(hidden: int, vocab: int, tokens: int, library: str) -> dict[str, Any]:
    torch.backends.cuda.preferred_blas_library(library)
    states, head, logits = normal(tokens, hidden), normal(vocab, hidden, std=0.02), normal(tokens, vocab, std=1e-4)
    head_gradient, states_gradient = torch.zeros_like(head), torch.empty_like(states)
    found = {
        "dx": timed(lambda: torch.mm(logits, head, out=states_gradient)),
        "dw0": timed(lambda: torch.mm(logits.t(), states, out=head_gradient)),
        "dw1": timed(lambda: torch.addmm(head_gradient, logits.t(), states, out=head_gradient)),
        "copy_dw": timed(lambda: head_gradient.mul_(1.0)),
        "logits": timed(lambda: torch.mm(states, head.t(), out=logits)),
    }
    torch.backends.cuda.preferred_blas_library("default")
    return {"kind": "products", "H": hidden, "V": vocab, "C": tokens, "blas": library, **found}


def overlap(hidden: int, vocab: int, tokens: int) -> dict[str, Any]:
    """The row kernel alone, after a product, and next to it on another stream."""
    logits, states, head = normal(tokens, vocab), normal(tokens, hidden), normal(vocab, hidden, std=0.02)
    out, side = torch.empty_like(logits), torch.cuda.Stream()
    arguments = LossArguments(
        labels_N=torch.randint(vocab, (tokens,), device="cuda"),
        loss_N=torch.empty(tokens, device="cuda"),
        seq_len=tokens,
        vocab=vocab,
        words=vocab,
        options=PLAIN_LOSS,
        scale=torch.ones(1, device="cuda"),
    )

    def rows() -> None:
        loss_and_gradient(arguments, logits, logits)

    def product() -> None:
        torch.mm(states, head.t(), out=out)

    def both(*, rows_first: bool) -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        for is_rows in (rows_first, not rows_first):
            with torch.cuda.stream(side if is_rows else main):
                (rows if is_rows else product)()
        main.wait_stream(side)

    return {
        "kind": "overlap",
        "H": hidden,
        "V": vocab,
        "C": tokens,
        "rows": timed(rows),
        "mm": timed(product),
        "serial": timed(lambda: (rows(), product())),
        "rows_first": timed(lambda: both(rows_first=True)),
        "mm_first": timed(lambda: both(rows_first=False)),
    }


@triton.jit
def _add_product_kernel(
    logits, states, head, V, H, C, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr,
    STORES: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Head [V, H] += logits [C, V].T @ states [C, H], which the L2 cache adds up."""
    across = tl.cdiv(H, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(V, BM) * across, PROGRAMS, flatten=FLAT):
        m, n = tile // across * BM, tile % across * BN
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, C, BK):
            total = tl.dot(logits.load([k, m]).T, states.load([k, n]), total)
        if STORES == 1:
            head.atomic_add([m, n], total.to(tl.bfloat16))
        else:
            left, right = tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))
            head.atomic_add([m, n], left.to(tl.bfloat16))
            head.atomic_add([m, n + BN // 2], right.to(tl.bfloat16))


def summed(
    hidden: int, vocab: int, tokens: int, tiling: tuple[int, int, int, int, int, int, int, bool]
) -> dict[str, Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows, columns, depth, warps, stages, per_processor, stores, flat = tiling
    states, logits = normal(tokens, hidden), normal(tokens, vocab, std=1e-4)
    gradient = torch.zeros(vocab, hidden, device="cuda", dtype=torch.bfloat16)
    descriptors = (
        TensorDescriptor.from_tensor(logits, [depth, rows]),
        TensorDescriptor.from_tensor(states, [depth, columns]),
        TensorDescriptor.from_tensor(gradient, [rows, columns // stores]),
    )
    programs = torch.cuda.get_device_properties(0).multi_processor_count * per_processor

    def run() -> Any:
        return _add_product_kernel[(programs,)](
            *descriptors, vocab, hidden, tokens, rows, columns, depth, programs, stores, flat,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip

    compiled = run()
    exact = logits[:, :4096].t().float() @ states.float()
    error = ((gradient[:4096].float() - exact).norm() / exact.norm()).item()
    name = f"{rows}x{columns}x{depth}, {warps} warps, {stages} stages, {per_processor} a processor"
    found = {"us": timed(run), "error": error, "registers": compiled.n_regs, "shared": compiled.metadata.shared}
    return {"kind": "dw", "H": hidden, "V": vocab, "C": tokens, "name": f"{name}, flat {flat}", **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    results: Path = parser.parse_args().results
    machine = CudaMachine()
    work: list[tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]] = [
        (products, (hidden, vocab, tokens, library))
        for library in LIBRARIES
        for hidden, vocab, chunks in PRODUCTS
        for tokens in chunks
    ]
    work.append((overlap, (2048, 128256, 1024)))
    work += [(summed, (*sizes, tiling)) for sizes in SUMS for tiling in TILINGS]
    with results.open("a") as lines:
        lines.write(json.dumps(machine.environment()) + "\n")
        for run, arguments in work:
            try:
                row = run(*arguments)
            except Exception as error:  # the others still count
                row = {"failed": run.__name__, "arguments": arguments, "reason": describe_failure(error)}
            machine.release()
            lines.write(json.dumps(row) + "\n")
            print(json.dumps(row), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
