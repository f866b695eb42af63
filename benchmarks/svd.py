"""Blocks that torch.linalg.svd (full_matrices=False) of an fp32 matrix takes from torch's allocator, event by event.

`python benchmarks/svd.py FILE` on a GPU; results of an H200 with torch 2.11 are in results/galore-svd-h200.jsonl.
"""

import json
import sys
from pathlib import Path

import torch

ACTIONS = ("alloc", "free_completed")


def events_of(rows: int, columns: int) -> dict[str, object]:
    matrix = torch.randn(rows, columns, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=10000, stacks="python", context=None)
    result = torch.linalg.svd(matrix, full_matrices=False)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    after = torch.cuda.memory_allocated()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    del result
    return {
        "rows": rows,
        "columns": columns,
        "before_bytes": before,
        "peak_bytes": peak,
        "after_bytes": after,
        "events": [
            [event["action"], event["size"]] for event in trace if event["action"] in ("alloc", "free_completed")
        ],
    }


def main(path: str) -> None:
    torch.cuda.init()
    # the context of the solver is made before anything is measured
    torch.linalg.svd(torch.randn(64, 64, device="cuda"))
    shapes = [
        (64, 64),
        (128, 64),
        (64, 128),
        (512, 512),
        (1024, 512),
        (512, 1024),
        (2048, 512),
        (512, 2048),
        (1024, 1024),
        (1536, 1024),
        (2048, 2048),
        (8192, 2048),
        (2048, 8192),
        (5632, 2048),
        (4096, 1024),
        (3072, 3072),
        (4096, 4096),
        (14336, 4096),
    ]
    with Path(path).open("w", encoding="utf-8") as out:
        print(
            json.dumps(
                {
                    "gpu": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "cuda": torch.version.cuda,
                    "library": str(torch.backends.cuda.preferred_linalg_library()),
                }
            ),
            file=out,
            flush=True,
        )
        for rows, columns in shapes:
            try:
                print(json.dumps(events_of(rows, columns)), file=out, flush=True)
            except RuntimeError as error:
                print(json.dumps({"rows": rows, "columns": columns, "error": str(error)[:200]}), file=out, flush=True)


main(sys.argv[1])
