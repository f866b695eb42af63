"""Compare the ledger of a GPU that two processes share with nvidia-smi and NVML.

    python benchmarks/device_ledger.py measure RESULT.jsonl  # requires a GPU that nothing else uses

`ligerprof run` records two processes: `graphs` trains in a CUDA graph next to a MemPool, `plain` without. Each trains
until its recorder has noted the GPU with all its memory held, and then stands still. While both do, nvidia-smi and NVML
are read. They are compared with the sum of all parts that the ledger names, without the rest that it cannot tell apart.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ligerprof.runs.recording.device import NvmlDevice

MIB = 2**20
GIB = 2**30
# a look at the GPU waits for the one before: 1 s, or 33 times what that took
SECONDS = 60.0
LOOKS = 3
RESTS = ("the driver, in no process", "contexts, libraries and other processes, not told apart")
ROLES = ("graphs", "plain")


def trainer(role: str) -> Callable[[], object]:
    """A step that allocates nothing new, after the passes that allocate everything."""
    device = torch.device("cuda")
    pool = torch.cuda.MemPool() if role == "graphs" else None
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, device=device) for _ in range(24)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    inputs = torch.randn(4096 if role == "graphs" else 8192, 4096, device=device)

    def pass_over() -> None:
        model(inputs).square().mean().backward()

    # captures need a first pass on another stream than the default one
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            pass_over()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    kept = []
    graph: torch.cuda.CUDAGraph | None = None
    if pool is not None:
        with torch.cuda.use_mem_pool(pool):
            kept.append(torch.ones(3 * GIB, dtype=torch.uint8, device=device))
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pass_over()

    def step() -> object:
        if graph is None:
            pass_over()
        else:
            graph.replay()
        optimizer.step()
        torch.cuda.synchronize()
        return kept

    for _ in range(3):
        step()
    return step


def hold(role: str, meeting: Path, step: Callable[[], object]) -> None:
    """Train until the recorder has noted the GPU, then stand still until both were looked at."""
    settled_us, started = time.time_ns() // 1000, time.monotonic()
    while not any(moment["at_us"] > settled_us for moment in noted(meeting)):
        if time.monotonic() - started > SECONDS:
            raise SystemExit(f"{role}: no note of the GPU in {SECONDS:.0f} s; noted before: {noted(meeting)}")
        step()
        time.sleep(0.1)
    (meeting / f"{role}.still").write_text(str(time.time_ns() // 1000))
    while not (meeting / "looks.json").exists() and time.monotonic() - started < 2 * SECONDS:
        time.sleep(0.05)


def noted(meeting: Path) -> list[dict[str, Any]]:
    """The moments in this process's live.json."""
    for path in (meeting / "run").glob(f"*{os.getpid()}/live.json"):
        moments: list[dict[str, Any]] = json.loads(path.read_text())["moments"]
        return moments
    return []


def used_by_nvidia_smi(uuid: str) -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", uuid]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * MIB


def pair(meeting: Path) -> None:
    """Run both at once, and look at the GPU while both stand still."""
    running = [subprocess.Popen([sys.executable, __file__, "hold", role, str(meeting)]) for role in ROLES]
    still = [meeting / f"{role}.still" for role in ROLES]
    while not all(path.exists() for path in still) and all(process.poll() is None for process in running):
        time.sleep(0.05)
    looks = []
    if all(path.exists() for path in still):
        uuid = (meeting / "uuid").read_text()
        nvml = NvmlDevice.find(uuid)
        for _ in range(LOOKS):
            memory = None if nvml is None else nvml.memory()
            looks.append(
                {
                    "at_us": time.time_ns() // 1000,
                    "nvidia_smi_bytes": used_by_nvidia_smi(uuid),
                    "nvml_bytes": None if memory is None else memory.used_bytes,
                    "nvml_reserved_bytes": None if memory is None else memory.reserved_bytes,
                    "nvml_processes": {} if nvml is None else nvml.process_bytes(),
                }
            )
            time.sleep(0.3)
    partial = meeting / "partial"
    partial.write_text(json.dumps(looks))
    partial.rename(meeting / "looks.json")
    codes = [process.wait() for process in running]
    print("exit codes", codes, "looks", looks, file=sys.stderr, flush=True)


def compare(device: dict[str, Any], looks: list[dict[str, Any]]) -> dict[str, Any]:
    """The last moment before the looks, when one process had stood still and the other was about to."""
    before = [moment for moment in device["moments"] if moment["at_us"] < looks[0]["at_us"]]
    moment = before[-1]
    known_bytes = sum(row["size_bytes"] for row in moment["rows"] if row["part"] not in RESTS)
    both = {row["process"] for row in moment["rows"] if row["process"]}
    if len(both) < len(ROLES):
        raise SystemExit(f"the last moment before the looks has rows of {both} alone: {moment}")
    return {
        "known_bytes": known_bytes,
        "used_bytes": moment["used_bytes"],
        "off": [round(known_bytes / look["nvidia_smi_bytes"] - 1, 5) for look in looks],
        "event": moment["event"],
        "process": moment["process"],
        "step": moment["step"],
        "seconds_before_looks": (looks[0]["at_us"] - moment["at_us"]) / 1e6,
        "rows": moment["rows"],
    }


def measure(results: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder)
        # the first look takes the stacks of all blocks; later ones are to come soon, so that the recording ends first
        run = [sys.executable, "-m", "ligerprof", "run", "--json", "--steps", "1", "-o", f"{folder}/run", "--"]
        program = [sys.executable, __file__, "pair", folder]
        done = subprocess.run([*run, *program], capture_output=True, text=True, check=False, env=dict(os.environ))
        print(done.stderr[-4000:], flush=True)
        looked = meeting / "looks.json"
        looks = json.loads(looked.read_text()) if looked.exists() else []
    device = json.loads(done.stdout)["devices"][0] if done.stdout else None
    if not looks or device is None:
        moments = [] if device is None else device["moments"]
        raise SystemExit(f"exit {done.returncode}, looks {looks}, moments {moments}")
    row = {"date": time.strftime("%Y-%m-%d"), "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    row |= {"looks": looks, **compare(device, looks), "exit": done.returncode}
    with results.open("a") as out:
        out.write(json.dumps(row) + "\n")
    for look, off in zip(looks, row["off"], strict=True):
        print({**look, "off": f"{100 * off:+.3f} %"})
    for part in row["rows"]:
        print("  ", part)
    print({key: value for key, value in row.items() if key not in ("rows", "looks")}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "hold", "pair"))
    parser.add_argument("first")
    parser.add_argument("second", nargs="?", type=Path)
    args = parser.parse_args()
    if args.what == "hold":
        step = trainer(args.first)
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        (args.second / f"{args.first}.uuid").write_text(uuid)
        (args.second / f"{args.first}.uuid").rename(args.second / "uuid")
        hold(args.first, args.second, step)
    elif args.what == "pair":
        pair(Path(args.first))
    else:
        measure(Path(args.first))


if __name__ == "__main__":
    main()
