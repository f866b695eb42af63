"""Measure the rates that step times are predicted from: products, attention, memory, optimizers, copies, the host.

    python benchmarks/time_rates.py benchmarks/results/time-rates-h200.jsonl

Requires a GPU that nothing else uses, and takes about 90 s. One JSON line per measurement, `seconds` per call. On the
GPU, calls are replayed as a CUDA graph, so that launches do not count; operands rotate, so that they come from memory
and not from the cache, unless a row says `"hot": true`. Rows of the kind `host` are seconds on the host's clock.
"""

# ruff: noqa: B023, FBT003, PLW0108 - each function is called before its loop goes on; torch's operators take positions

import argparse
import itertools
import json
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
aten = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32
# bytes that operands of one graph cover, several times the L2 cache
COLD_BYTES = 160 << 20
Call = Callable[[], object]


def graph_seconds(calls: Sequence[Call], *, least: float = 0.006, rounds: int = 3) -> float:
    """Seconds per call on the GPU."""
    if not CUDA:
        for call in calls:
            call()
        return 0.0
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for call in calls:
        call()
    torch.cuda.synchronize()
    guess = max((time.perf_counter() - started) / len(calls), 2e-6)
    times = max(1, min(200 // len(calls), math.ceil(least / (guess * len(calls)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in list(calls) * times:
            call()
    graph.replay()
    found = []
    for _ in range(rounds):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) / 1000 / (times * len(calls)))
    return statistics.median(found)


def stream_seconds(call: Call, times: int = 20) -> float:
    """Seconds per call on the GPU where a call cannot be part of a graph; launches count if they take longer."""
    call()
    synchronize()
    started = time.perf_counter()
    for _ in range(times):
        call()
    synchronize()
    return (time.perf_counter() - started) / times


def host_seconds(call: Call, times: int = 300) -> float:
    """Seconds per call on the host, which launches and does not wait."""
    for _ in range(times // 10):
        call()
    synchronize()
    found = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(times):
            call()
        found.append((time.perf_counter() - started) / times)
        synchronize()
    return min(found)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE) * 0.02


def copies(bytes_each: int) -> int:
    return max(1, min(24, COLD_BYTES // max(bytes_each, 1)))


Row = dict[str, Any]

WEIGHTS = (
    *((512, 512), (576, 1536), (768, 3072), (896, 896), (896, 4864), (1024, 1024), (1024, 4096), (1536, 8960)),
    *((2048, 512), (2048, 2048), (2048, 8192), (8192, 2048), (3072, 8192), (4096, 1024), (4096, 4096)),
    *((4096, 14336), (14336, 4096), (896, 151936), (2048, 128256), (4096, 32000), (4096, 16), (16, 4096), (2048, 64)),
)
TOKENS = (128, 512, 1024, 2048, 4096, 8192, 16384)
MOST_FLOPS = 9e12


def one_product(m: int, n: int, k: int, layout: str, dtype: torch.dtype) -> Row:
    """[m, k] times [k, n]; layouts: 'nt' a weight of [n, k], 'nn' its input's gradient, 'tn' its own gradient."""
    width = torch.finfo(dtype).bits // 8
    count = copies((m * n + n * k + m * k) * width)
    calls = []
    for _ in range(count):
        left = random(k, m, dtype=dtype).t() if layout == "tn" else random(m, k, dtype=dtype)
        right = random(n, k, dtype=dtype).t() if layout == "nt" else random(k, n, dtype=dtype)
        out = torch.empty(m, n, dtype=dtype, device=DEVICE)
        calls.append(lambda left=left, right=right, out=out: torch.mm(left, right, out=out))
    return {"m": m, "n": n, "k": k, "layout": layout, "seconds": graph_seconds(calls)}


def products() -> Iterator[Row]:
    for (inputs, outputs), tokens in itertools.product(WEIGHTS, TOKENS):
        if 2 * inputs * outputs * tokens > MOST_FLOPS or (not CUDA and (tokens > 128 or inputs * outputs > 10**6)):
            continue
        shapes = ((tokens, outputs, inputs, "nt"), (tokens, inputs, outputs, "nn"), (outputs, inputs, tokens, "tn"))
        for shape in shapes:
            yield {"kind": "product", "dtype": "bf16", **one_product(*shape, BF16)}
    for tf32 in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        for (inputs, outputs), tokens in itertools.product(
            ((576, 1536), (1024, 1024), (2048, 2048), (2048, 8192), (896, 4864), (4096, 4096)), (512, 2048, 4096)
        ):
            if not CUDA:
                continue
            shapes = ((tokens, outputs, inputs, "nt"), (tokens, inputs, outputs, "nn"), (outputs, inputs, tokens, "tn"))
            for shape in shapes:
                yield {"kind": "product", "dtype": "tf32" if tf32 else "fp32", **one_product(*shape, FP32)}
    torch.backends.cuda.matmul.allow_tf32 = False


def batched() -> Iterator[Row]:
    for batch, tokens, head in ((32, 512, 64), (128, 512, 64), (64, 1024, 128), (32, 2048, 128), (256, 256, 64)):
        for dtype in (BF16, FP32):
            width = torch.finfo(dtype).bits // 8
            row = {"kind": "product", "dtype": "bf16" if dtype is BF16 else "fp32", "layout": "bmm", "batch": batch}
            for m, n, k in ((tokens, tokens, head), (tokens, head, tokens)):
                calls = []
                for _ in range(copies(batch * width * (m * n + n * k + m * k))):
                    left, right = random(batch, m, k, dtype=dtype), random(batch, k, n, dtype=dtype)
                    calls.append(lambda left=left, right=right: torch.bmm(left, right))
                yield {**row, "m": m, "n": n, "k": k, "seconds": graph_seconds(calls)}
    for groups, rows, inputs, outputs in ((8, 8192, 2048, 1536), (64, 16384, 2048, 1024), (8, 4096, 4096, 14336)):
        left, right = random(rows, inputs), random(groups, inputs, outputs)
        ends = torch.arange(1, groups + 1, device=DEVICE, dtype=torch.int32) * (rows // groups)
        row = {"kind": "product", "dtype": "bf16", "layout": "grouped", "batch": groups, "m": rows // groups}
        yield {
            **row,
            "n": outputs,
            "k": inputs,
            "seconds": graph_seconds([partial(torch._grouped_mm, left, right, offs=ends)]),
        }


def attention() -> Iterator[Row]:
    shapes = (
        *((4, 32, 1024, 64), (4, 32, 1024, 128), (2, 32, 2048, 128), (1, 32, 4096, 128), (1, 32, 8192, 128)),
        *((1, 32, 16384, 64), (8, 14, 512, 64), (2, 16, 2048, 64), (16, 12, 256, 64), (1, 9, 512, 64)),
        *((2, 8, 1024, 256), (1, 32, 2048, 96), (2, 16, 512, 128), (4, 12, 1024, 80)),
    )
    for shape, kernel in itertools.product(shapes, ("cudnn", "flash", "efficient", "efficient-masked")):
        batch, heads, tokens, head = shape
        row = {"batch": batch, "heads": heads, "tokens": tokens, "head": head, "kernel": kernel}
        try:
            for what, call in _attention_calls(*shape, kernel).items():
                yield {"kind": "attention", "what": what, **row, "seconds": graph_seconds([call])}
        except RuntimeError as error:
            yield {"kind": "refused", **row, "why": str(error)[:200]}


def _attention_calls(batch: int, heads: int, tokens: int, head: int, kernel: str) -> dict[str, Call]:
    query, key, value, grad = (random(batch, tokens, heads, head).transpose(1, 2) for _ in range(4))
    scale: Any = head**-0.5
    if kernel == "flash":
        out = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scale)
        return {
            "forward": lambda: aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scale),
            "backward": lambda: aten._scaled_dot_product_flash_attention_backward(
                grad, query, key, value, *out[:6], 0.0, True, *out[6:8], scale=scale
            ),
        }
    if kernel == "cudnn":
        given = (query, key, value, None, True, 0.0, True)
        out = aten._scaled_dot_product_cudnn_attention(*given, scale=scale)
        return {
            "forward": lambda: aten._scaled_dot_product_cudnn_attention(*given, scale=scale),
            "backward": lambda: aten._scaled_dot_product_cudnn_attention_backward(
                grad, query, key, value, *out[:2], *out[6:8], None, *out[2:6], 0.0, True, scale=scale
            ),
        }
    causal = kernel == "efficient"
    mask = None if causal else random(batch, 1, tokens, tokens).expand(-1, heads, -1, -1)
    asked = (query, key, value, mask, True, 0.0, causal)
    out = aten._scaled_dot_product_efficient_attention(*asked, scale=scale)
    wanted = [True, True, True, False]
    return {
        "forward": lambda: aten._scaled_dot_product_efficient_attention(*asked, scale=scale),
        "backward": lambda: aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, mask, *out[:4], 0.0, wanted, causal, scale=scale
        ),
    }


def memory() -> Iterator[Row]:
    """Kernels that move bytes; `bytes` are those of inputs and outputs."""
    for power, hot in itertools.product((12, 15, 18, 20, 22, 24, 26, 27), (False, True)):
        count, columns = 1 << power, 2048
        if not CUDA and power > 18:
            continue
        rows = max(count // columns, 1)
        makers: dict[str, Callable[[], tuple[int, Call]]] = {
            "add": lambda: _three(count, torch.add),
            "mul-fp32": lambda: _three(count, torch.mul, FP32),
            "cast-up": lambda: _two(count, BF16, FP32),
            "cast-down": lambda: _two(count, FP32, BF16),
            "silu": lambda: _made(count, lambda x: torch.nn.functional.silu(x)),
            "silu-backward": lambda: _three(count, None),
            "pow": lambda: _made(count, lambda x: x.pow(2), FP32),
            "fill": lambda: _filled(count),
            "mean-rows": lambda: _reduced(rows, columns, lambda x: x.mean(-1, keepdim=True)),
            "sum-columns": lambda: _reduced(rows, columns, lambda x: x.sum(0)),
            "softmax": lambda: _made_rows(rows, columns, lambda x: torch.softmax(x, -1)),
            "layer-norm": lambda: _made_rows(rows, columns, lambda x: torch.layer_norm(x, [columns]), BF16),
            "transposed": lambda: _made_rows(rows, columns, lambda x: x.t().contiguous(), BF16),
            "heads": lambda: _heads(rows, columns),
            "cat": lambda: _cat(rows, columns),
            "broadcast": lambda: _broadcast(rows, columns),
        }
        for name, make in makers.items():
            if hot and power > 24:
                continue
            size_bytes, call = make()
            calls = [call] + [make()[1] for _ in range(0 if hot else copies(size_bytes) - 1)]
            yield {"kind": "memory", "what": name, "hot": hot, "bytes": size_bytes, "seconds": graph_seconds(calls)}


def _three(count: int, function: Any, dtype: torch.dtype = BF16) -> tuple[int, Call]:
    left, right = random(count, dtype=dtype), random(count, dtype=dtype)
    out = torch.empty_like(left)
    if function is None:
        return 3 * out.nbytes, lambda: aten.silu_backward(left, right)
    return 3 * out.nbytes, lambda: function(left, right, out=out)


def _two(count: int, given: torch.dtype, made: torch.dtype) -> tuple[int, Call]:
    source, out = random(count, dtype=given), torch.empty(count, dtype=made, device=DEVICE)
    return source.nbytes + out.nbytes, lambda: out.copy_(source)


def _made(count: int, function: Callable[[Tensor], Tensor], dtype: torch.dtype = BF16) -> tuple[int, Call]:
    source = random(count, dtype=dtype)
    return 2 * source.nbytes, lambda: function(source)


def _made_rows(
    rows: int, columns: int, function: Callable[[Tensor], Any], dtype: torch.dtype = FP32
) -> tuple[int, Call]:
    source = random(rows, columns, dtype=dtype)
    return 2 * source.nbytes, lambda: function(source)


def _reduced(rows: int, columns: int, function: Callable[[Tensor], Tensor]) -> tuple[int, Call]:
    source = random(rows, columns, dtype=FP32)
    return source.nbytes, lambda: function(source)


def _filled(count: int) -> tuple[int, Call]:
    out = torch.empty(count, dtype=BF16, device=DEVICE)
    return out.nbytes, lambda: out.zero_()


def _heads(rows: int, columns: int) -> tuple[int, Call]:
    source = random(rows, columns // 64, 64)
    return 2 * source.nbytes, lambda: source.transpose(0, 1).contiguous()


def _cat(rows: int, columns: int) -> tuple[int, Call]:
    left, right = random(rows, columns // 2), random(rows, columns // 2)
    return 4 * left.nbytes, lambda: torch.cat((left, right), -1)


def _broadcast(rows: int, columns: int) -> tuple[int, Call]:
    source, factor = random(rows, columns), random(columns)
    return 2 * source.nbytes, lambda: source * factor


def losses() -> Iterator[Row]:
    for rows, columns in ((512, 32000), (2048, 128256), (4096, 151936), (4096, 50257)) if CUDA else ((8, 64),):
        logits, labels = random(rows, columns, dtype=FP32), torch.randint(0, columns, (rows,), device=DEVICE)
        made = torch.log_softmax(logits, -1)
        row = {"kind": "loss", "rows": rows, "columns": columns, "bytes": 2 * logits.nbytes}
        yield {**row, "what": "log-softmax", "seconds": graph_seconds([lambda: torch.log_softmax(logits, -1)])}
        grad = random(rows, columns, dtype=FP32)
        calls = [lambda: aten._log_softmax_backward_data(grad, made, 1, FP32)]
        yield {**row, "what": "log-softmax-backward", "bytes": 3 * logits.nbytes, "seconds": graph_seconds(calls)}
        weight, total = torch.ones((), device=DEVICE), torch.tensor(float(rows), device=DEVICE)
        calls = [lambda: aten.nll_loss_backward(weight, made, labels, None, 1, -100, total)]
        yield {**row, "what": "nll-backward", "bytes": logits.nbytes, "seconds": graph_seconds(calls)}
        hidden = random(rows, 1024)
        call = partial(aten.embedding_dense_backward, hidden, labels, columns, -1, False)
        yield {**row, "what": "embedding-backward", "bytes": columns * 2048, "seconds": stream_seconds(call)}
        table = random(columns, 1024)
        calls = [lambda: torch.nn.functional.embedding(labels, table)]
        yield {**row, "what": "embedding", "bytes": 2 * hidden.nbytes, "seconds": graph_seconds(calls)}


def optimizers() -> Iterator[Row]:
    sizes = [(1 << 22,) * 24, (1 << 25,) * 8, (1 << 16,) * 200, (2048,) * 200] if CUDA else [(16,) * 2]
    for dtype, counts in itertools.product((BF16, FP32), sizes):
        for name, options in {
            "adamw-fused": {"fused": True},
            "adamw-foreach": {"foreach": True},
            "adamw": {"foreach": False},
            "sgd": {"foreach": True},
        }.items():
            weights = [nn.Parameter(random(count, dtype=dtype)) for count in counts]
            for weight in weights:
                weight.grad = random(weight.numel(), dtype=dtype)
            kind: Any = torch.optim.SGD if name == "sgd" else torch.optim.AdamW
            optimizer = kind(weights, lr=1e-5, **options)
            for _ in range(3):
                optimizer.step()
            row = {"kind": "optimizer", "what": name, "dtype": "bf16" if dtype is BF16 else "fp32"}
            row |= {"tensors": len(counts), "elements": sum(counts)}
            found = []
            for _ in range(4):
                synchronize()
                started = time.perf_counter()
                optimizer.step()
                launched = time.perf_counter() - started
                synchronize()
                found.append((time.perf_counter() - started, launched))
            seconds, host = sorted(found)[1]
            yield {**row, "seconds": seconds, "host_seconds": host}


def transfers() -> Iterator[Row]:
    for power in (16, 20, 23, 26, 28):
        if not CUDA:
            return
        pinned = torch.empty(1 << power, dtype=torch.uint8, pin_memory=True)
        own = torch.empty(1 << power, dtype=torch.uint8, device=DEVICE)
        for what, call in {
            "to-gpu": lambda: own.copy_(pinned, non_blocking=True),
            "to-host": lambda: pinned.copy_(own, non_blocking=True),
        }.items():
            call()
            synchronize()
            started = time.perf_counter()
            for _ in range(4):
                call()
            synchronize()
            yield {
                "kind": "transfer",
                "what": what,
                "bytes": 1 << power,
                "seconds": (time.perf_counter() - started) / 4,
            }


class Doubled(torch.autograd.Function):
    """A function in Python, as kernels have them."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value + value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return grad + value


def host() -> Iterator[Row]:
    """Seconds of the host per call, on tensors too small to keep the GPU busy."""
    left, right = random(8, 64), random(8, 64)
    trained = random(8, 64).requires_grad_()
    layer = nn.Linear(64, 64, bias=False, device=DEVICE, dtype=BF16)
    calls: dict[str, Call] = {
        "add": lambda: left + right,
        "add-recorded": lambda: trained + right,
        "view": lambda: left.view(8, 8, 8),
        "cast": lambda: left.float(),
        "mm": lambda: torch.mm(left, right.t()),
        "linear-module": lambda: layer(trained),
        "silu": lambda: torch.nn.functional.silu(trained),
        "mean": lambda: left.mean(-1, keepdim=True),
        "function": lambda: Doubled.apply(trained),
        "empty": lambda: torch.empty(8, 64, device=DEVICE),
    }
    for name, call in calls.items():
        yield {"kind": "host", "what": name, "seconds": host_seconds(call)}

    def chain(step: Callable[[Tensor], Tensor]) -> Call:
        def run() -> None:
            value = trained
            for _ in range(100):
                value = step(value)
            value.sum().backward()

        return run

    chains: dict[str, Callable[[Tensor], Tensor]] = {
        "chain-add": lambda value: value + right,
        "chain-mul": lambda value: value * right,
        "chain-linear": lambda value: torch.nn.functional.linear(value, layer.weight),
        "chain-function": lambda value: Doubled.apply(value),
    }
    for name, step in chains.items():
        yield {"kind": "host", "what": name, "seconds": host_seconds(chain(step), 20) / 100}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    results = parser.parse_args().results
    gpu = torch.cuda.get_device_name() if CUDA else "cpu"
    about = {"kind": "about", "gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda}
    with results.open("w") as lines:
        lines.write(json.dumps({**about, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}) + "\n")
        if CUDA:
            # the clock under load, not that of a cold GPU
            heavy = random(8192, 8192)
            for _ in range(600):
                torch.mm(heavy, heavy)
        for part in (products, batched, attention, memory, losses, optimizers, transfers, host):
            started = time.perf_counter()
            try:
                for row in part():
                    lines.write(json.dumps(row) + "\n")
            except Exception:
                lines.write(json.dumps({"kind": "error", "part": part.__name__, "why": traceback.format_exc()}) + "\n")
            synchronize()
            seconds = time.perf_counter() - started
            lines.write(json.dumps({"kind": "part", "part": part.__name__, "seconds": round(seconds, 1)}) + "\n")
            lines.flush()
            print(f"{part.__name__}: {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
