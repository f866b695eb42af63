"""Measure time and memory of `ligerprof trace` on a large trace, which repeats a real step.

    python benchmarks/trace_size.py > benchmarks/results/trace-size.json

On a busy machine `seconds` includes waiting; `cpu_seconds` does not.
"""

import argparse
import json
import lzma
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEP = Path(__file__).parents[1] / "tests" / "data" / "traces" / "llama3.2-1b-step.pt.trace.json.xz"
# between one step and its repetition, microseconds
PAUSE_US = 1000.0


def repeated(events: list[dict[str, Any]], step: int) -> Iterator[str]:
    """The events as a later step would have them: other times, correlations and operators' ids."""
    starts = [event["ts"] for event in events if event.get("ph") == "X"]
    length_us = max(event["ts"] + event["dur"] for event in events if event.get("ph") == "X") - min(starts)
    for event in events:
        moved = {**event, "ts": event["ts"] + step * (length_us + PAUSE_US)}
        args = dict(event.get("args", {}))
        for key in ("correlation", "External id"):
            if key in args:
                args[key] += step * 10_000_000
        if event.get("name") == "ProfilerStep#2":
            moved["name"] = f"ProfilerStep#{step + 2}"
        yield json.dumps({**moved, "args": args})


def write_trace(path: Path, megabytes: int) -> int:
    """Write a trace of at least this size; returns its steps."""
    values = json.loads(lzma.decompress(STEP.read_bytes()))
    events = values.pop("traceEvents")
    steps = 0
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(values)[:-1] + ', "traceEvents": [\n')
        while file.tell() < megabytes * 10**6:
            file.write(",\n" if steps else "")
            file.write(",\n".join(repeated(events, steps)))
            steps += 1
        file.write("\n]}\n")
    return steps


def measure(path: Path) -> dict[str, Any]:
    """Seconds and peak memory of the command in a separate process."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "ligerprof", "trace", str(path), "--json"], capture_output=True, check=True
    )
    report = json.loads(done.stdout)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "file_bytes": path.stat().st_size,
        "steps": len(report["steps"]),
        "kernels": report["kernels"],
        "gpu_busy_share": report["gpu_busy_share"],
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_rss_bytes": used.ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--keep", type=Path, help="Leave the file there.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.keep or Path(folder) / "large.pt.trace.json"
        write_trace(path, options.megabytes)
        print(json.dumps(measure(path), indent=2))


if __name__ == "__main__":
    main()
