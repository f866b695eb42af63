"""Time `ligerprof explain` and other readers on a snapshot of a million allocator events.

    python benchmarks/snapshot_speed.py
    python benchmarks/snapshot_speed.py --events 200000 --rounds 3 --keep million.pickle

The file is generated each time: a recording of tests/data/snapshots, repeated with new addresses until there are
enough events. `--unshared` gives every event its own list of frames and its own strings, as torch writes them. Every
measurement runs in a separate process, and they alternate, so that a busy machine affects all of them. pt-snap, if it
is on the path, is measured once.
"""

import argparse
import importlib.util
import itertools
import json
import os
import pickle
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from ligerprof.snapshots.reader import read_snapshot

ROOT = Path(__file__).resolve().parent.parent
RECORDING = ROOT / "tests" / "data" / "snapshots" / "hf-ckpt-4x1024.pickle.xz"
RESULT = ROOT / "benchmarks" / "results" / "snapshot-speed.json"
# as far apart as no recording's addresses are
APART_BYTES = 2**41
# addresses of the recording start near 2**47; the copies stay below 2**63
LARGEST_COPIES = 2**63 // APART_BYTES - 2**7
LOAD = "import gc, pickle, sys; gc.disable(); pickle.load(open(sys.argv[1], 'rb'))"
PT_SNAP = "pt-snap import"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START = "import gc, pickle, sys; gc.disable()"


def repeated(recording: Path, events: int, *, unshared: bool) -> dict[str, Any]:
    """The recording repeated, each time at other addresses and later."""
    snapshot = read_snapshot(recording)
    trace = snapshot.trace_of(0)
    copies = -(-events // len(trace))
    if copies > LARGEST_COPIES:
        raise SystemExit(f"{events} events take more than {LARGEST_COPIES} copies.")
    span_us = trace[-1]["time_us"] - trace[0]["time_us"] + 1
    return {
        "segments": [moved_segment(segment, copy) for copy in range(copies) for segment in snapshot.segments],
        "device_traces": [
            [
                moved(event, "addr", copy) | {"time_us": event["time_us"] + copy * span_us} | own(event, unshared)
                for copy in range(copies)
                for event in trace
            ]
        ],
        "allocator_settings": snapshot.settings,
        "external_annotations": [],
    }


def own(event: Mapping[str, Any], unshared: bool) -> dict[str, Any]:
    """What an event shares with others, made anew."""
    if not unshared:
        return {}
    frames = list(event["frames"]) if event["action"] == "alloc" else event["frames"]
    return {"frames": frames, "compile_context": "".join(list(event["compile_context"]))}


def write(path: Path, events: int, unshared: bool) -> int:
    values = repeated(RECORDING, events, unshared=unshared)
    path.write_bytes(pickle.dumps(values))
    return len(values["device_traces"][0])


def moved(values: Mapping[str, Any], key: str, copy: int) -> dict[str, Any]:
    return {**values, key: values[key] + copy * APART_BYTES} if key in values else dict(values)


def moved_segment(segment: Mapping[str, Any], copy: int) -> dict[str, Any]:
    return moved(segment, "address", copy) | {"blocks": [moved(block, "address", copy) for block in segment["blocks"]]}


def contenders(path: Path, scratch: Path) -> dict[str, list[str]]:
    python = sys.executable
    known = {
        "python, start alone": [python, "-c", START],
        "pickle.load, collector off": [python, "-c", LOAD, str(path)],
        "ligerprof explain --json": [python, "-m", "ligerprof", "explain", str(path), "--json"],
        "torch._memory_viz stats": [python, "-m", "torch.cuda._memory_viz", "stats", str(path)],
    }
    pt_snap = shutil.which("pt-snap")
    if pt_snap is not None:
        known[PT_SNAP] = [pt_snap, "import", str(path), "-o", str(scratch / "pt-snap"), "--force", "--no-focus"]
    if importlib.util.find_spec("torch") is None:
        del known["torch._memory_viz stats"]
    return known


def measure(command: list[str]) -> dict[str, float]:
    """Wall seconds and peak resident MiB of one whole process."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}.")
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_mib": usage.ru_maxrss / 2**10,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="Write the file here and keep it.")
    parser.add_argument("--unshared", action="store_true", help="Give every event its own stack and strings.")
    parser.add_argument("--skip", action="append", default=[], help="Leave out what has this in its name.")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.keep or Path(folder) / "repeated.pickle"
        # Linux counts the memory of the process that forks into the peak of its children: this one stays small
        with ProcessPoolExecutor(1) as pool:
            events = pool.submit(write, path, options.events, options.unshared).result()
        commands = {
            name: command
            for name, command in contenders(path, Path(folder)).items()
            if not any(word in name for word in options.skip)
        }
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
        for turn, (name, command) in itertools.product(range(options.rounds), commands.items()):
            if turn == 0 or name != PT_SNAP:
                runs[name].append(measure(command))
        facts = {"events": events, "unshared": options.unshared, "file_bytes": path.stat().st_size}
        report(runs, facts | page(path, Path(folder)), options.output)


def page(path: Path, scratch: Path) -> dict[str, int]:
    """Bytes of the page, and milliseconds until a browser had drawn it, loading included."""
    file = scratch / "page.html"
    measure([sys.executable, "-m", "ligerprof", "explain", str(path), "--json", "--html", str(file)])
    facts = {"page_bytes": file.stat().st_size}
    if BROWSER is None:
        return facts
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={scratch / 'profile'}"]
    command = [BROWSER, *options, "--window-size=1280,900", "--virtual-time-budget=2000", "--dump-dom", str(file)]
    drawn = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    milliseconds = re.search(r'data-drawn-ms="(\d+)"', drawn)
    return facts | ({"page_drawn_ms": int(milliseconds.group(1))} if milliseconds else {})


def report(runs: Mapping[str, list[dict[str, float]]], facts: Mapping[str, Any], output: Path) -> None:
    medians = {
        name: {key: round(median(run[key] for run in measured), 3) for key in measured[0]}
        for name, measured in runs.items()
    }
    base = medians["pickle.load, collector off"]
    for name, row in medians.items():
        print(
            f"{name:28} {row['seconds']:7.2f} s  {row['seconds'] / base['seconds']:5.2f} x"
            f"  {row['cpu_seconds']:6.2f} s CPU  {row['cpu_seconds'] / base['cpu_seconds']:5.2f} x"
            f"  {row['peak_mib']:7.0f} MiB  {row['peak_mib'] / base['peak_mib']:5.2f} x"
        )
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    about = {"python": platform.python_version(), "cores": os.cpu_count(), "recording": RECORDING.name, **facts}
    output.write_text(json.dumps({"about": about, "medians": medians, "runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
