"""Time `ligerprof explain` and other readers on snapshots of millions of allocator events.

    python benchmarks/snapshot_speed.py
    python benchmarks/snapshot_speed.py --events 200000 --rounds 3 --kinds moved --keep folder
    python benchmarks/snapshot_speed.py --table

The first command takes about five minutes on two idle cores. It measures a million events in five rounds and five
million in three, writes benchmarks/results/snapshot-speed.json, and prints the table of docs/results/explain-speed.md,
as the last one does from that file alone.

The files are generated each time: a recording of tests/data/snapshots, repeated until there are enough events.
`moved` repeats it at new addresses, so that every event fits those before it. `in-place` repeats it at its own
addresses, as the steps of a training loop do, although its allocations then do not fit what is still held. `ring` is
the end of a moved one, as a full ring buffer leaves it. `unshared` is a moved one in which every event has its own list
of frames and its own strings, as torch writes them.

Every measurement runs in a separate process, and they alternate, so that a busy machine affects all of them; the ratio
is the median of the ratios of each round. The load average before the first round is part of the result. Other tools
are measured once, on the first file. Bytecode is compiled before the first round, as for an installed package, also
where PYTHONDONTWRITEBYTECODE is set.
"""

import argparse
import atexit
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
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import ligerprof
from ligerprof.snapshots.reader import read_snapshot

ROOT = Path(__file__).resolve().parent.parent
RECORDING = ROOT / "tests" / "data" / "snapshots" / "hf-nockpt-8x1024.pickle.xz"
RESULT = ROOT / "benchmarks" / "results" / "snapshot-speed.json"
# as far apart as no recording's addresses are
APART_BYTES = 2**41
# addresses of the recording start near 2**47; the copies stay below 2**63
LARGEST_COPIES = 2**63 // APART_BYTES - 2**7
LOAD = "import gc, pickle, sys; gc.disable(); pickle.load(open(sys.argv[1], 'rb'))"
LOAD_NAME, EXPLAIN, PT_SNAP = "pickle.load, collector off", "ligerprof explain --json", "pt-snap import"
PAIR = (LOAD_NAME, EXPLAIN)
MANY_EVENTS, ROUNDS, ROUNDS_OF_MANY = 2_000_000, 5, 3
KINDS = ("moved", "in-place", "ring", "unshared")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START = "import gc, pickle, sys; gc.disable()"


def repeated(recording: Path, events: int, kind: str) -> dict[str, Any]:
    """The recording repeated, each time later, and at other addresses unless it is repeated in place."""
    snapshot = read_snapshot(recording)
    trace = snapshot.trace_of(0)
    copies = -(-events // len(trace)) + (kind == "ring")
    if copies > LARGEST_COPIES:
        raise SystemExit(f"{events} events take more than {LARGEST_COPIES} copies.")
    span_us = trace[-1]["time_us"] - trace[0]["time_us"] + 1
    places = [0] * copies if kind == "in-place" else range(copies)
    repeats = [
        moved(event, "addr", place) | {"time_us": event["time_us"] + copy * span_us} | own(event, kind == "unshared")
        for copy, place in enumerate(places)
        for event in trace
    ]
    return {
        "segments": [moved_segment(segment, place) for place in sorted(set(places)) for segment in snapshot.segments],
        "device_traces": [repeats[-events:] if kind == "ring" else repeats],
        "allocator_settings": snapshot.settings,
        "external_annotations": [],
    }


def own(event: Mapping[str, Any], unshared: bool) -> dict[str, Any]:
    """What an event shares with others, made anew."""
    if not unshared:
        return {}
    frames = list(event["frames"]) if event["action"] == "alloc" else event["frames"]
    return {"frames": frames, "compile_context": "".join(list(event["compile_context"]))}


def write(path: Path, events: int, kind: str) -> int:
    """Write a file, and return its number of events."""
    values = repeated(RECORDING, events, kind)
    with path.open("wb") as file:
        pickle.dump(values, file)
    return len(values["device_traces"][0])


def moved(values: Mapping[str, Any], key: str, copy: int) -> dict[str, Any]:
    return {**values, key: values[key] + copy * APART_BYTES} if key in values else dict(values)


def moved_segment(segment: Mapping[str, Any], copy: int) -> dict[str, Any]:
    return moved(segment, "address", copy) | {"blocks": [moved(block, "address", copy) for block in segment["blocks"]]}


def contenders(path: Path, scratch: Path) -> dict[str, list[str]]:
    python = sys.executable
    known = {
        "python, start alone": [python, "-c", START],
        LOAD_NAME: [python, "-c", LOAD, str(path)],
        EXPLAIN: [python, "-m", "ligerprof", "explain", str(path), "--json"],
        "torch._memory_viz stats": [python, "-m", "torch.cuda._memory_viz", "stats", str(path)],
    }
    pt_snap = shutil.which("pt-snap")
    if pt_snap is not None:
        known[PT_SNAP] = [pt_snap, "import", str(path), "-o", str(scratch / "pt-snap"), "--force", "--no-focus"]
    if importlib.util.find_spec("torch") is None:
        del known["torch._memory_viz stats"]
    return known


@cache
def environment() -> dict[str, str]:
    """The environment of every measured process: bytecode is kept in a folder that ends with this process."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found = {**kept, "PYTHONPYCACHEPREFIX": folder}
    warm_up = [sys.executable, "-m", "ligerprof", "explain", str(RECORDING), "--json"]
    subprocess.run(warm_up, stdout=subprocess.DEVNULL, cwd=ROOT, env=found, check=True)
    return found


def measure(command: list[str]) -> dict[str, float]:
    """Wall seconds and peak resident MiB of one whole process."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment())
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
    parser.add_argument("--events", type=int, nargs="+", default=[1_000_000, 5_000_000])
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--rounds", type=int, help="Default: 5, and 3 for more than a million events.")
    parser.add_argument("--keep", type=Path, help="Write the files into this folder and keep them.")
    parser.add_argument("--skip", action="append", default=[], help="Leave out what has this in its name.")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    parser.add_argument("--table", action="store_true", help="Print the table of a result that is there already.")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.output.read_text(encoding="utf-8"))))
        return
    about = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "ligerprof": ligerprof.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "recording": RECORDING.name,
    }
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for events in options.events:
            paths = {kind: (options.keep or Path(folder)) / f"{kind}-{events}.pickle" for kind in options.kinds}
            # Linux counts the memory of the process that forks into the peak of its children: this one stays small
            with ProcessPoolExecutor(2) as pool:
                written = {kind: pool.submit(write, path, events, kind) for kind, path in paths.items()}
            for kind, path in paths.items():
                facts = {"kind": kind, "events": written[kind].result(), "file_bytes": path.stat().st_size}
                cases.append(measured(path, Path(folder), facts, options, is_first=not cases))
                if not options.keep:
                    path.unlink()
                result = {"about": about, "cases": cases}
                options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


def table(result: Mapping[str, Any]) -> str:
    """The result as a table in Markdown: medians, and the medians of the ratios of each round."""
    lines = [
        "| events | kind | file, MB | `pickle.load` | `explain --json` | time | memory |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for case in result["cases"]:
        about, ratios = case["about"], case["explain_by_load"]
        load, own = (f"{row['seconds']:.2f} s, {row['peak_mib']:.0f} MiB" for row in map(case["medians"].get, PAIR))
        size = f"{about['events']:,} | {about['kind']} | {about['file_bytes'] / 1e6:.0f}"
        lines.append(f"| {size} | {load} | {own} | {ratios['seconds']:.2f} | {ratios['peak_mib']:.2f} |")
    return "\n".join(lines)


def measured(path: Path, scratch: Path, facts: dict[str, Any], options: argparse.Namespace, *, is_first: bool) -> Any:
    commands = {
        name: command
        for name, command in contenders(path, scratch).items()
        if not any(word in name for word in options.skip) and (is_first or name in PAIR)
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    rounds = options.rounds or (ROUNDS if facts["events"] < MANY_EVENTS else ROUNDS_OF_MANY)
    for turn, (name, command) in itertools.product(range(rounds), commands.items()):
        if turn == 0 or name in PAIR:
            runs[name].append(measure(command))
    page_facts = page(path, scratch) if is_first else {}
    return report(runs, facts | page_facts)


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


def report(runs: Mapping[str, list[dict[str, float]]], facts: dict[str, Any]) -> dict[str, Any]:
    """One case of the result, printed as well."""
    medians = {
        name: {key: round(median(run[key] for run in rounds), 3) for key in rounds[0]} for name, rounds in runs.items()
    }
    pairs = list(zip(runs[EXPLAIN], runs[LOAD_NAME], strict=True))
    ratios = {key: round(median(one[key] / base[key] for one, base in pairs), 2) for key in pairs[0][0]}
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    for name, row in medians.items():
        print(
            f"  {name:28} {row['seconds']:7.2f} s {row['cpu_seconds']:7.2f} s CPU {row['peak_mib']:7.0f} MiB",
            "".join(f"{key} x {value}  " for key, value in ratios.items()) if name == EXPLAIN else "",
        )
    return {"about": facts, "explain_by_load": ratios, "medians": medians, "runs": runs}


if __name__ == "__main__":
    main()
