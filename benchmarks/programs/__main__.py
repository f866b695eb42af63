"""Record programs that know nothing of ligerprof, with the truth about what their storages hold.

    python benchmarks/programs build/programs
    python benchmarks/programs build/programs --only nanogpt dpo
    python benchmarks/programs build/programs --ranks 2

Requires a CUDA GPU, or two for `--ranks 2`. Each program runs in a process of its own. The folder gets NAME.pickle.xz,
the snapshot as torch dumps it, and NAME.json: max_memory_allocated and max_memory_reserved, `live` (address, bytes and
role of the storages that are alive at the end, or when memory ran out), and `tags` (number of allocations so far,
address, bytes, role and name of a storage at that moment). Of several ranks, the first one writes. Programs whose
packages are missing end with the reason.
"""

import argparse
import json
import lzma
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# each module registers its programs
import again
import decoding
import failures
import finetuning
import generative
import gpu_only
import kinds
import language
import others
import preferences
import pretraining
import sharded
import sharded_more
import torch
import wider
from truth import PROGRAMS, TRUTH

MODULES = (
    again,
    decoding,
    failures,
    finetuning,
    generative,
    gpu_only,
    kinds,
    language,
    others,
    preferences,
    pretraining,
    sharded,
)
MODULES += (sharded_more, wider)
MIB = 2**20
_MAX_ENTRIES = 400_000
_LONGEST_RUN_SECONDS = 150
_FIRST_PORT = 29500
_LATE_STEP = 2


def record(name: str, folder: Path) -> None:
    """Run one program in this process, and write its recording and truth."""
    function, options = PROGRAMS[name]
    torch.manual_seed(0)
    torch.cuda.init()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    failed_at: list[dict[str, Any]] = []
    if "limit_mib" in options:
        _limit(options["limit_mib"] * MIB, failed_at)
    if options.get("late"):
        _start_late(options)
    else:
        _start(options)
    ran_out = False
    try:
        function()
    except torch.OutOfMemoryError:
        ran_out = True
        if not failed_at:
            raise
    torch.cuda.synchronize()
    taken = failed_at[-1] if ran_out else {"allocated_at_dump": torch.cuda.memory_allocated()}
    snapshot, found = (taken.pop("snapshot"), taken.pop("truth")) if ran_out else (_snapshot(), TRUTH.read())
    truth = {
        "name": name,
        **options,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "out_of_memory": ran_out,
        "ooms": len(failed_at),
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "max_memory_reserved": torch.cuda.max_memory_reserved(),
        **taken,
        **found,
    }
    if os.environ.get("RANK", "0") == "0":
        (folder / f"{name}.pickle.xz").write_bytes(lzma.compress(pickle.dumps(snapshot), preset=6))
        (folder / f"{name}.json").write_text(json.dumps(truth), encoding="utf-8")


def _start(options: dict[str, Any]) -> None:
    stacks, context = options.get("stacks", "all"), options.get("context", "all")
    torch.cuda.memory._record_memory_history(max_entries=_MAX_ENTRIES, stacks=stacks, context=context)


def _start_late(options: dict[str, Any]) -> None:
    """Start recording at the second optimizer step."""
    step, count = torch.optim.AdamW.step, 0

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == _LATE_STEP:
            _start(options)
        return step(self, *arguments, **named)

    torch.optim.AdamW.step = counted


def _limit(limit_bytes: int, failed_at: list[dict[str, Any]]) -> None:
    """Limit reserved memory, and take the recording where an allocation fails."""
    total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes)

    def observe(*figures: int) -> None:
        failed_at.append(
            {
                "snapshot": _snapshot(),
                "truth": TRUTH.read(),
                "allocated_at_failure": torch.cuda.memory_allocated(),
                "reserved_at_failure": torch.cuda.memory_reserved(),
                "observer": list(figures),
            }
        )

    torch._C._cuda_attach_out_of_memory_observer(observe)


def _snapshot() -> Any:
    return torch.cuda.memory._snapshot()


def run(number: int, name: str, folder: Path) -> str:
    """Record a program in a process of its own; one line on how it ended."""
    ranks = PROGRAMS[name][1].get("ranks", 1)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port"]
    several = [*launcher, str(_FIRST_PORT + number)] if ranks > 1 else []
    command = [sys.executable, *several, __file__, str(folder), "--here", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST_RUN_SECONDS)
    except subprocess.TimeoutExpired:
        return f"{name}: over {_LONGEST_RUN_SECONDS} s"
    if done.returncode:
        return f"{name}: exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"
    truth = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return f"{name}: peak {truth['max_memory_allocated'] / MIB:,.0f} MiB{', out of memory' * truth['out_of_memory']}"


def main() -> None:
    """Record programs, several at a time: their allocations do not depend on each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=sorted(PROGRAMS), metavar="NAME", help=", ".join(sorted(PROGRAMS)))
    parser.add_argument("--ranks", type=int, default=1, help="Programs for this number of GPUs.")
    parser.add_argument("--jobs", type=int, default=5, help="Programs at a time.")
    parser.add_argument("--here", choices=sorted(PROGRAMS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.here:
        record(options.here, options.folder)
        return
    names = options.only or [name for name, (_, of) in PROGRAMS.items() if of.get("ranks", 1) == options.ranks]
    with ThreadPoolExecutor(options.jobs) as pool:
        for line in pool.map(lambda item: run(*item, options.folder), enumerate(names)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
