"""Compare reserved bytes under settings of the allocator, replayed from a recording, with the same on a GPU.

    python benchmarks/alloc_confs.py measure RESULT.jsonl
    python benchmarks/alloc_confs.py table RESULT.jsonl

`measure` records each program once under torch's defaults, replays that, and runs the program under other settings.
Where a program needs less under the advised settings, it also runs under a limit between the two: by default it has to
run out of memory, and with the settings that `explain` advises for that failure it has to pass.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "unchanged_programs"
PROGRAMS = {
    "rl-loop": "rl_loop.py",
    "timm-vit": "timm_vit.py",
    "lengths": "lengths.py",
    "lengths-long": "lengths.py --longest 3000 --steps 16 --layers 4",
    "qwen2-vl": "vision_language.py",
    "unet": "unet.py",
    "mixtral": "mixture.py",
    "distillation": "distill.py",
    "adafactor": "trainer_causal.py --optim adafactor --seq 1024",
}
CONFS = ("expandable_segments:True", "max_split_size_mb:128", "roundup_power2_divisions:8")
WORTH_A_LIMIT = 0.03
SECONDS = 240


def run(argv: str, *, conf: str = "", limit_bytes: int = 0, record: Path | None = None) -> dict[str, Any]:
    """Torch's counters at the end of a program, and whether it ran out of memory."""
    command = [sys.executable, str(HERE / "peak.py"), str(HERE / argv.split(maxsplit=1)[0]), *argv.split()[1:]]
    if record is not None:
        command = [sys.executable, "-m", "ligerprof", "run", "-o", str(record), "--", *command]
    env = os.environ | ({"PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {})
    env |= {"MEMORY_LIMIT_BYTES": str(limit_bytes)} if limit_bytes else {}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("TORCH-PEAK ")]
    counters = json.loads(lines[-1].removeprefix("TORCH-PEAK ")) if lines else {}
    row = {key: counters.get(key) for key in ("peak_bytes", "reserved_bytes", "retries", "ooms")}
    return row | {"exit": done.returncode, "ran_out": "OutOfMemoryError" in done.stderr + done.stdout}


def explained(recording: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "ligerprof", "explain", str(recording), "--alloc-confs", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    return {key: found[key] for key in ("reserved_bytes", "alloc_confs", "suggestions")}


def measure(results: Path, only: list[str]) -> None:
    import torch

    about = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    with results.open("x") as out, tempfile.TemporaryDirectory() as folder:

        def write(row: dict[str, Any]) -> None:
            out.write(json.dumps(about | row) + "\n")
            out.flush()
            print(row, file=sys.stderr, flush=True)

        for name in only or PROGRAMS:
            argv, record = PROGRAMS[name], Path(folder, name)
            recorded = run(argv, record=record)
            replayed = {one["alloc_conf"]: one for one in explained(record)["alloc_confs"] or ()}
            write({"program": name, "alloc_conf": "", **recorded, "replayed": replayed.get("")})
            for conf in CONFS:
                write({"program": name, "alloc_conf": conf, **run(argv, conf=conf), "replayed": replayed.get(conf)})
            least = {conf: one["smallest_limit_bytes"] for conf, one in replayed.items() if one["smallest_limit_bytes"]}
            best = min(least, key=lambda conf: (least[conf], len(conf)), default="")
            if not least or least[best] > (1 - WORTH_A_LIMIT) * least[""]:
                continue
            limit_bytes, failed = (least[best] + least[""]) // 2, Path(folder, f"{name}-limited")
            by_default = run(argv, limit_bytes=limit_bytes, record=failed)
            advised = next((one for one in explained(failed)["suggestions"] if one["name"] == "alloc-conf"), None)
            conf = advised["how"][0].partition("PYTORCH_CUDA_ALLOC_CONF=")[2] if advised else ""
            write({"program": name, "limit_bytes": limit_bytes, "by_default": by_default, "advised": conf})
            if conf:
                write(
                    {
                        "program": name,
                        "limit_bytes": limit_bytes,
                        "alloc_conf": conf,
                        **run(argv, conf=conf, limit_bytes=limit_bytes),
                    }
                )


def table(results: Path) -> None:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    misses = []
    for row in rows:
        if row.get("replayed") is None:
            print(
                row["program"],
                row.get("limit_bytes", ""),
                row.get("alloc_conf", row.get("advised")),
                row.get("ran_out"),
                row.get("by_default"),
            )
            continue
        off = row["replayed"]["reserved_bytes"] / row["reserved_bytes"] - 1
        misses += [abs(off)] if row["alloc_conf"] else []
        print(f"{row['program']:14}{row['alloc_conf']:30}{row['reserved_bytes']:>14,}{100 * off:+9.2f} %")
    print(f"{len(misses)} settings: median {100 * statistics.median(misses):.2f} %, worst {100 * max(misses):.2f} %")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "table"))
    parser.add_argument("results", type=Path)
    parser.add_argument("programs", nargs="*")
    args = parser.parse_args()
    measure(args.results, args.programs) if args.action == "measure" else table(args.results)
