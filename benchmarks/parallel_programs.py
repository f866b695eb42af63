"""Ranks of unchanged programs of several GPUs: measured, measured alone with torch's fake process group, and simulated.

    python benchmarks/parallel_programs.py measure build/parallel.jsonl --gpus 2     # needs two GPUs
    python benchmarks/parallel_programs.py alone build/alone.jsonl                   # needs one
    python benchmarks/parallel_programs.py simulate build/simulated.jsonl --gpus 2   # needs none
    python benchmarks/parallel_programs.py simulate build/simulated.jsonl --gpus 8 --ranks 7   # against `alone`
    python benchmarks/parallel_programs.py compare build/parallel.jsonl build/simulated.jsonl

A program prints what torch's counters say after each of its steps, on each rank.
"""

import argparse
import contextlib
import datetime as dt
import importlib.metadata
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAMS = Path(__file__).parent / "parallel_programs"
MESHES = [
    "ddp",
    "fsdp1",
    "fsdp1-half",
    "fsdp1-original",
    "fsdp1-grad-op",
    "fsdp1-offload",
    "hsdp",
    "fsdp2",
    "fsdp2-mixed",
    "tp",
    "sp",
    "fsdp2-tp",
    "cp",
    "gpipe",
    "1f1b",
    "interleaved",
    "zero-bubble",
    "ep",
]
CASES = (
    {f"meshes-{mode}": ("torchrun", f"meshes.py {mode}") for mode in MESHES}
    | {
        "zero-1": ("deepspeed", "zero.py 1"),
        "zero-1-accumulate": ("deepspeed", "zero.py 1 --accumulate 4"),
        "zero-2-lora-256": ("deepspeed", "zero.py 2 --lora --tokens 256 --batch 1"),
        "zero-2-lora-1024": ("deepspeed", "zero.py 2 --lora --batch 1"),
        "zero-2-offload": ("deepspeed", "zero.py 2 --offload --layers 2"),
        "zero-3": ("deepspeed", "zero.py 3"),
        # sends that nobody waits for stay until the step ends if the GPU is slower than the program
        "interleaved-32": ("torchrun", "meshes.py interleaved 32"),
        "zero-bubble-32": ("torchrun", "meshes.py zero-bubble 32"),
        "losses-linear": ("torchrun", "losses.py linear"),
        "losses-logits": ("torchrun", "losses.py logits"),
        "outside": ("torchrun", "outside.py"),
    }
    | {
        f"trl-{kind}-{engine}": (
            f"accelerate --config_file {{folder}}/{engine}.yaml",
            f"trl_run.py trl.scripts.{kind} --config {{folder}}/{kind}.yaml",
        )
        for kind in ("sft", "dpo")
        for engine in ("fsdp2", "zero3")
    }
)
# without another rank's messages
ALONE = {f"meshes-{mode}": 8 for mode in MESHES if mode.startswith("fsdp") or mode in ("tp", "sp", "hsdp", "cp")}
STEP = re.compile(r"rank (\d+) step (\d+): (\d+) (\d+)")
MARK = "PARALLEL_PROGRAM"
OUTSIDE = re.compile(r"rank (\d+) outside (\S+): (\d+) (\d+) (\S+)")


def launched(case: str, options: argparse.Namespace) -> list[str]:
    launcher, words = (text.format(folder=options.folder) for text in CASES[case])
    launcher, *given = shlex.split(launcher)
    program, *rest = shlex.split(words)
    if launcher == "torchrun":
        start = ["-m", "torch.distributed.run", f"--nproc-per-node={options.gpus}", f"--master-port={options.port}"]
    elif launcher == "deepspeed":
        start = ["-m", "deepspeed.launcher.runner", f"--num_gpus={options.gpus}", f"--master_port={options.port}"]
    else:
        start = ["-m", "accelerate.commands.launch", f"--main_process_port={options.port}", *given]
    return [sys.executable, *start, str(PROGRAMS / program), *rest]


def kill_marked(mark: bytes) -> None:
    """Kill every process whose environment has this variable."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def ran(command: list[str], environment: dict[str, str], seconds: float = 120) -> dict:
    """The counters of each rank after each step, bytes outside the allocator, and the last line of an error."""
    mark = f"{MARK}={os.getpid()}-{time.monotonic_ns()}"
    variables = dict([mark.split("=")])
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **environment, **variables}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
        # launchers give their ranks sessions of their own
        kill_marked(mark.encode())
        process.wait()
        output.seek(0)
        text = output.read()
    if process.returncode:
        print(text[-8000:], file=sys.stderr, flush=True)
    ranks: dict[str, list[list[int]]] = {}
    for rank, _, peak, reserved in STEP.findall(text):
        ranks.setdefault(rank, []).append([int(peak), int(reserved)])
    outside: dict[str, dict[str, list[int | None]]] = {}
    for rank, moment, used, _, listed in OUTSIDE.findall(text):
        held = int(listed) << 20 if listed.isdecimal() else None
        outside.setdefault(rank, {})[moment] = [int(used), held]
    lines = [line for line in text.splitlines() if "Error" in line]
    problem = (lines or text.splitlines() or ["no output"])[-1][-300:] if process.returncode else ""
    return {"ranks": ranks, "outside": outside, "problem": problem}


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "deepspeed"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "alone", "simulate", "compare"))
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--ranks", default="", help="the ranks to simulate; default: all")
    parser.add_argument("--seconds", type=float, default=120, help="limit of one program on GPUs")
    parser.add_argument(
        "--port", type=int, default=29500, help="where ranks meet; another one for programs side by side"
    )
    parser.add_argument("--folder", type=Path, default=Path("build/trl"), help="what trl_make.py wrote, for TRL's")
    options = parser.parse_args()
    if options.action == "compare":
        compare(*options.files)
        return
    chosen = options.only.split(",") if options.only else list(ALONE if options.action == "alone" else CASES)
    with options.files[0].open("a") as file:
        for case in chosen:
            row = {"case": case, "world": options.gpus, "how": options.action} | row_of(case, options)
            row |= {"versions": versions(), "date": dt.date.today().isoformat()}
            print(json.dumps(row), file=file, flush=True)
            print(case, {rank: steps[-1] for rank, steps in row["ranks"].items()}, row["problem"], flush=True)


def row_of(case: str, options: argparse.Namespace) -> dict:
    began = time.monotonic()
    if options.action == "measure":
        row = ran(launched(case, options), {}, options.seconds)
    elif options.action == "alone":
        world = ALONE[case]
        words = shlex.split(f"meshes.py {case.partition('-')[2]}")
        command = [sys.executable, str(PROGRAMS / "alone.py"), str(PROGRAMS / words[0]), *words[1:]]
        rank = {"RANK": str(world - 1), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
        row = ran(command, rank, options.seconds) | {"world": world}
    else:
        with tempfile.TemporaryDirectory() as folder:
            run = ["-m", "ligerprof", "run", "--device", "simulated", "--json", "-o", f"{folder}/run"]
            ranks = options.ranks or f"0-{options.gpus - 1}"
            command = [sys.executable, *run, "--ranks", ranks, "--", *launched(case, options)]
            row = ran(command, {}, 600)
    return row | {"seconds": round(time.monotonic() - began, 1)}


def compare(measured: Path, simulated: Path) -> None:
    truth = {(row["case"], row["world"]): row for row in map(json.loads, measured.read_text().splitlines())}
    errors: list[tuple[float, float]] = []
    for row in map(json.loads, simulated.read_text().splitlines()):
        true = truth.get((row["case"], row["world"]))
        for rank, steps in row["ranks"].items() if true else ():
            if rank not in true["ranks"]:
                continue
            peak, reserved = (steps[-1][place] / true["ranks"][rank][-1][place] - 1 for place in (0, 1))
            errors.append((abs(peak), abs(reserved)))
            print(f"{row['case']:24} rank {rank}: peak {peak:+.4%} reserved {reserved:+.2%}")
    for name, place in (("peak", 0), ("reserved", 1)):
        values = [error[place] for error in errors]
        if values:
            print(f"{name}: median {statistics.median(values):.4%}, worst {max(values):.4%} of {len(values)} ranks")


if __name__ == "__main__":
    main()
