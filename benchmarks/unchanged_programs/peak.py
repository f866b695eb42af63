"""Runs a file or a module as `python FILE` or `python -m MODULE` would; torch's own counters go to stderr at the end.

    python peak.py FILE.py|MODULE [ARGUMENTS]

MEMORY_LIMIT_BYTES in the environment limits the process, as torch.cuda.set_per_process_memory_fraction does.
"""

import atexit
import json
import os
import runpy
import sys
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

steps: list[tuple[int, int, int]] = []


def note(*_: object) -> None:
    if len(steps) < 64:
        counters = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved
        steps.append(tuple(counter() for counter in counters))


def say() -> None:
    counters = torch.cuda.memory_stats()
    row = {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "requested_bytes": counters.get("requested_bytes.all.peak"),
        "retries": counters.get("num_alloc_retries"),
        "ooms": counters.get("num_ooms"),
        "after_optimizer_steps": steps,
        "total_memory_bytes": torch.cuda.get_device_properties(0).total_memory,
    }
    print("TORCH-PEAK " + json.dumps(row), file=sys.stderr, flush=True)


if torch.cuda.is_available():
    atexit.register(say)
    register_optimizer_step_post_hook(note)
    limit = os.environ.get("MEMORY_LIMIT_BYTES")
    if limit:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(int(limit) / total)
sys.argv = sys.argv[1:]
if sys.argv[0].endswith(".py"):
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
