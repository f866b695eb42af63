"""Compare the ledger of a GPU that two processes share with nvidia-smi.

    python benchmarks/device_ledger.py measure RESULT.jsonl  # requires a GPU that nothing else uses

`ligerprof run` records two processes: `graphs` trains in a CUDA graph next to a MemPool, `plain` without. Meanwhile,
nvidia-smi is asked for the memory in use. It is compared with the sum of all parts that the ledger names, without the
rest that it cannot tell apart.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

MIB = 2**20
GIB = 2**30
HELD_SECONDS = 12.0
RESTS = ("the driver, in no process", "contexts, libraries and other processes, not told apart")
ROLES = ("graphs", "plain")
# later than the capture and the first updates
_SETTLED_STEP = 5


def hold(role: str, meeting: Path | None) -> None:
    """Train until both processes have held their memory for a while; print what is outside torch's allocator."""
    device = torch.device("cuda")
    # steps are to be shorter than the pause between two looks
    torch.backends.cuda.matmul.allow_tf32 = True
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
    if meeting is not None:
        (meeting / role).write_text(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    end = time.monotonic() + (1.0 if meeting is None else 60.0)
    while time.monotonic() < end:
        if (
            meeting is not None
            and all((meeting / each).exists() for each in ROLES)
            and end - time.monotonic() > HELD_SECONDS
        ):
            end = time.monotonic() + HELD_SECONDS
        if graph is None:
            # the call of a model begins a step
            pass_over()
        else:
            model(inputs[:16])
            graph.replay()
        optimizer.step()
        torch.cuda.synchronize()
        time.sleep(0.1)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    print("HELD", json.dumps([role, torch.cuda.memory_reserved(), total_bytes - free_bytes]), flush=True)


def used_by_nvidia_smi(uuid: str) -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", uuid]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * MIB


def pair(meeting: Path) -> None:
    """Run both at once, and note nvidia-smi."""
    running = [subprocess.Popen([sys.executable, __file__, "hold", role, str(meeting)]) for role in ROLES]
    looks: list[tuple[int, int]] = []
    while any(process.poll() is None for process in running):
        if all((meeting / role).exists() for role in ROLES):
            uuid = (meeting / ROLES[0]).read_text()
            if uuid:
                looks.append((time.time_ns() // 1000, used_by_nvidia_smi(uuid)))
        time.sleep(0.3)
    (meeting / "looks.json").write_text(json.dumps(looks))


def measure(results: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder)
        # without stacks, looks take milliseconds
        run = [sys.executable, "-m", "ligerprof", "run", "--json", "--steps", "1:3", "-o", f"{folder}/run", "--"]
        program = [sys.executable, __file__, "pair", folder]
        done = subprocess.run([*run, *program], capture_output=True, text=True, check=False, env=dict(os.environ))
        if not done.stdout:
            raise SystemExit(done.stderr)
        report = json.loads(done.stdout)
        looks = json.loads((meeting / "looks.json").read_text())
    device = report["devices"][0]
    rows = []
    for moment in device["moments"]:
        # nothing changes while both hold their memory
        then = [used for at_us, used in looks if abs(at_us - moment["at_us"]) < 2_000_000]
        both = {row["process"] for row in moment["rows"] if row["process"]}
        if not then or len(both) < len(ROLES) or moment["event"] != "step" or moment["step"] < _SETTLED_STEP:
            continue
        known_bytes = sum(row["size_bytes"] for row in moment["rows"] if row["part"] not in RESTS)
        sizes = {"nvidia_smi_bytes": then[0], "known_bytes": known_bytes, "used_bytes": moment["used_bytes"]}
        rows.append(
            {
                "process": moment["process"],
                "step": moment["step"],
                **sizes,
                "off": round(known_bytes / then[0] - 1, 5),
                "rows": moment["rows"],
            }
        )
    gpu: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    row = {"date": time.strftime("%Y-%m-%d"), **gpu, "processes": len(report["ranks"])}
    row |= {"moments": rows, "looks": len(device["moments"]), "notes": report["notes"], "exit": done.returncode}
    with results.open("a") as out:
        out.write(json.dumps(row) + "\n")
    for one in rows:
        print(f"nvidia-smi {one['nvidia_smi_bytes']:,}, known {one['known_bytes']:,} ({100 * one['off']:+.2f} %)")
    for part in rows[-1]["rows"] if rows else ():
        print("  ", part)
    print({key: value for key, value in row.items() if key != "moments"}, flush=True)
    if not rows:
        print([{key: value for key, value in each.items() if key != "rows"} for each in device["moments"]], looks[:9])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "hold", "pair"))
    parser.add_argument("first")
    parser.add_argument("second", nargs="?", type=Path)
    args = parser.parse_args()
    if args.what == "hold":
        hold(args.first, args.second)
    elif args.what == "pair":
        pair(Path(args.first))
    else:
        measure(Path(args.first))
