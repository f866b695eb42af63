"""A recording such as torch makes of a program that generates text: deep stacks of shared frames, and few call sites.

Run as a module, it writes one: `python -m tests.snapshots.deep_stacks deep.pickle 1000000`.
"""

import pickle
import random
import sys
from pathlib import Path
from typing import Any

from ligerprof.snapshots.collector import collector_paused

_FRAMES, _COMMON, _DEPTH, _SITES = 9000, 50, 100, 3500
_SEGMENTS, _SEGMENT_BYTES, _ADDRESS = 400, 2 << 20, 0x7F0000000000
_START_US, _LAYERS, _BUILD = 1_790_000_000_000_000, 28, "ligerprof;0;build;;"


def deep_recording(events: int, *, seed: int = 0) -> dict[str, Any]:
    """What torch.cuda.memory._snapshot() returns: one dict per frame, and a list and a text per event."""
    draw = random.Random(seed)
    frames = [_frame(number) for number in range(_FRAMES)]
    stacks = [
        [*draw.choices(frames[_COMMON:], k=_DEPTH - _COMMON + draw.randrange(-20, 20)), *frames[:_COMMON]]
        for _ in range(_SITES)
    ]
    trace = [
        _event(
            "segment_alloc", _ADDRESS + slot * _SEGMENT_BYTES, _SEGMENT_BYTES, slot, "ligerprof;0;build;;", stacks[0]
        )
        for slot in range(_SEGMENTS)
    ]
    number = 0
    while len(trace) < events:
        site, slot = number % _SITES, number % _SEGMENTS
        size, stack = 512 * draw.randrange(1, 2000), list(stacks[site])
        stamp = f"ligerprof;{1 + number * 9 // events};evaluation;model.layers.{site % _LAYERS}.self_attn.q_proj;"
        for action in ("alloc", "free_requested", "free_completed"):
            place = _ADDRESS + slot * _SEGMENT_BYTES
            trace.append(_event(action, place, size, _SEGMENTS + 3 * len(trace), f" {stamp}"[1:], stack))
        number += 1
    return {
        "segments": [_segment(slot, stacks[0]) for slot in range(_SEGMENTS)],
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _frame(number: int) -> dict[str, Any]:
    if number % 3:
        return {"name": f"at::function_{number}(at::Tensor const&)", "filename": "??", "line": 0}
    file = f"/usr/lib/python3/site-packages/torch/nn/modules/module_{number % 400}.py"
    return {"name": f"forward_{number}", "filename": file, "line": number % 3000}


def _event(action: str, address: int, size_bytes: int, time_us: int, stamp: str, frames: list[Any]) -> dict[str, Any]:
    place = {"action": action, "addr": address, "size": size_bytes, "stream": 0, "time_us": _START_US + time_us}
    return {**place, "compile_context": " N/A"[1:], "user_metadata": stamp, "frames": frames}


def _segment(slot: int, frames: list[Any]) -> dict[str, Any]:
    address = _ADDRESS + slot * _SEGMENT_BYTES
    block = {"address": address, "size": _SEGMENT_BYTES, "requested_size": 0, "state": "inactive", "frames": []}
    sizes = {"total_size": _SEGMENT_BYTES, "allocated_size": 0, "active_size": 0, "requested_size": 0}
    kind = {"stream": 0, "segment_type": "small", "segment_pool_id": (0, 0), "is_expandable": False}
    return {"device": 0, "address": address, **sizes, **kind, "blocks": [block], "frames": frames}


if __name__ == "__main__":
    with collector_paused():
        Path(sys.argv[1]).write_bytes(pickle.dumps(deep_recording(int(sys.argv[2])), protocol=4))
