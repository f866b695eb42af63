"""Small traces: entries as Kineto writes them."""

import json
from pathlib import Path
from typing import Any

from tests.paths import DATA

RECORDING = DATA / "traces" / "llama3.2-1b-step.pt.trace.json.xz"
PROCESS, MAIN, BACKWARD = 1, 10, 11

Entry = dict[str, Any]


def span(category: str, name: str, start: float, duration: float, **fields: Any) -> Entry:
    thread = fields.pop("tid", MAIN)
    return {"ph": "X", "cat": category, "name": name, "pid": PROCESS, "tid": thread, "ts": start, "dur": duration} | (
        {"args": fields} if fields else {}
    )


def step(start: float, duration: float, number: int = 1) -> Entry:
    return span("user_annotation", f"ProfilerStep#{number}", start, duration)


def kernel(start: float, duration: float, name: str = "gemm", **args: Any) -> Entry:
    return span("kernel", name, start, duration, tid=7, **({"device": 0, "stream": 7} | args))


def copy(start: float, duration: float, **args: Any) -> Entry:
    return span("gpu_memcpy", "Memcpy DtoD (Device -> Device)", start, duration, **({"device": 0, "stream": 7} | args))


def call(start: float, duration: float, correlation: int, name: str = "cudaLaunchKernel", tid: int = MAIN) -> Entry:
    return span("cuda_runtime", name, start, duration, tid=tid, correlation=correlation)


def operator(start: float, duration: float, name: str = "aten::mm", tid: int = MAIN, **args: Any) -> Entry:
    return span("cpu_op", name, start, duration, tid=tid, **args)


def write(path: Path, *entries: Any) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": list(entries), "traceName": "x"}), encoding="utf-8")
    return path
