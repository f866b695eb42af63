"""Read snapshots of extreme shapes, 10 MB each, and compare processor time and memory with the promised limits.

    python benchmarks/hostile_shapes.py
    python benchmarks/hostile_shapes.py --shapes "many stacks" "deep stacks" --commands json html --megabytes 2

Each file is generated, with one extreme: its stacks, stamps, blocks, segments, addresses, sizes or order. Every command
runs in a process of its own. The limits are those of docs/reliability.md: 10 seconds of processor time, and three times
the unpacked bytes plus 256 MiB of memory, per file that the command reads. A refusal with one line counts as an answer.
"""

import argparse
import json
import lzma
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "hostile-shapes.json"
MOST_SECONDS = 10
MIB = 2**20
START = 2**46
SEGMENT_BYTES = 2**40
# a command that takes so many times its limit is stopped
PATIENCE = 6

# in a small process of its own: the highest memory that the system reports starts with that of the parent
MEASURED = """
import json, os, resource, sys
nowhere = os.open(os.devnull, os.O_WRONLY)
child = os.posix_spawn(
    sys.executable, [sys.executable, *sys.argv[2:]], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, nowhere, 1)]
)
seconds = int(sys.argv[1])
resource.prlimit(child, resource.RLIMIT_CPU, (seconds, seconds))
_, status, usage = os.wait4(child, 0)
took = usage.ru_utime + usage.ru_stime
print(json.dumps({
    "exit": os.waitstatus_to_exitcode(status), "seconds": round(took, 1), "mib": round(usage.ru_maxrss / 1024)
}))
"""

Event = dict[str, Any]
Shape = Callable[[int], dict[str, Any]]

FRAMES = [{"filename": "train.py", "name": "<module>", "line": 3}]


def frame(number: int, file: str = "model.py") -> Event:
    return {"filename": file, "name": f"layer_{number % 1000}", "line": number % 100_000}


def event(action: str, address: int, size: int = 512, frames: list[Event] = FRAMES, **others: Any) -> Event:
    return {"action": action, "addr": START + address, "size": size, "stream": 0, "frames": frames, **others}


def freed(address: int, size: int = 512, frames: list[Event] = FRAMES, **others: Any) -> list[Event]:
    return [event(f"free_{step}", address, size, frames, **others) for step in ("requested", "completed")]


def segment(blocks: Iterable[tuple[int, str]] = (), total: int = SEGMENT_BYTES, address: int = 0) -> Event:
    held = [{"size": size, "requested_size": size, "state": state, "frames": FRAMES} for size, state in blocks]
    rest = total - sum(block["size"] for block in held)
    held += [{"size": rest, "state": "inactive", "frames": []}] if rest else []
    return {
        "address": START + address,
        "total_size": total,
        "stream": 0,
        "device": 0,
        "segment_type": "large",
        "blocks": held,
    }


def snapshot(*traces: list[Event], segments: list[Event] | None = None, **others: Any) -> dict[str, Any]:
    """The traces, one per device, with the time of each event and one large segment that is there from the start."""
    timed = [[{**one, "time_us": 10 + index} for index, one in enumerate(trace)] for trace in traces]
    return {"segments": [segment()] if segments is None else segments, "device_traces": timed, **others}


def grown(events: Iterable[Event]) -> list[Event]:
    return [event("segment_alloc", 0, SEGMENT_BYTES), *events]


def paired(count: int, frames_of: Callable[[int], list[Event]] = lambda _: FRAMES, **others: Any) -> list[Event]:
    """Blocks that are allocated and freed one after another, each in front of the free space."""
    return grown(
        one
        for number in range(count)
        for one in (event("alloc", 0, 512, frames_of(number), **others), *freed(0, 512, frames_of(number), **others))
    )


def stamps(count: int, phase: Callable[[int], str], module: Callable[[int], str]) -> dict[str, Any]:
    def text(number: int) -> str:
        return json.dumps({"phase": phase(number), "step": number % 50, "module": module(number)})

    events = grown(event("alloc", 512 * number, user_metadata=text(number)) for number in range(count))
    return snapshot(events, segments=[segment((512, "active_allocated") for _ in range(count))])


def kept(count: int) -> dict[str, Any]:
    events = grown(event("alloc", 512 * number) for number in range(count))
    return snapshot(events, segments=[segment((512, "active_allocated") for _ in range(count))])


def all_freed_at_once(count: int) -> dict[str, Any]:
    made = [event("alloc", 512 * number) for number in range(count)]
    return snapshot(grown([*made, *(one for number in range(count) for one in freed(512 * number))]))


def fragmented(count: int) -> dict[str, Any]:
    made = [event("alloc", 512 * number) for number in range(count)]
    holes = [one for number in range(0, count, 2) for one in freed(512 * number)]
    again = [event("alloc", 512 * number, 256) for number in range(0, count, 2)]
    return snapshot(grown([*made, *holes, *again]), segments=[segment((512, "active_allocated") for _ in range(count))])


def cut_ends(count: int) -> dict[str, Any]:
    """A ring buffer: only frees of blocks that are older."""
    order = list(range(count))
    random.Random(1).shuffle(order)
    return snapshot([one for number in order for one in freed(1024 * number)])


def damaged(count: int) -> dict[str, Any]:
    events = kept(count)["device_traces"][0] + all_freed_at_once(count // 3)["device_traces"][0]
    random.Random(2).shuffle(events)
    return {**snapshot([]), "device_traces": [events]}


def steps(count: int) -> dict[str, Any]:
    """Training steps as torch annotates optimizers, one for each few events."""
    names = [frame(1, "/site-packages/torch/nn/modules/module.py"), frame(2, "/site-packages/torch/optim/adam.py")]
    values = snapshot(paired(count, lambda number: [names[number % 2], *FRAMES]))
    notes = [
        {"name": f"Optimizer.step#Adam.step{index}", "stage": stage, "time_us": 10 + 3 * index + place, "device": 0}
        for index in range(count)
        for place, stage in enumerate(("START", "END"))
    ]
    return values | {"external_annotations": notes}


def passes(count: int) -> dict[str, Any]:
    forward = [{"filename": "torch/nn/modules/module.py", "name": "_call_impl", "line": 1}, *FRAMES]
    backward = [{"filename": "torch/autograd/graph.py", "name": "_engine_run_backward", "line": 1}, *FRAMES]
    return snapshot(paired(count, lambda number: (forward, backward)[number % 2]))


def failures(count: int) -> dict[str, Any]:
    return snapshot(
        grown(
            one
            for number in range(count)
            for one in (event("alloc", 512 * number), event("oom", 0, 2**34, device_free=2**20))
        ),
        segments=[segment((512, "active_allocated") for _ in range(count))],
    )


def segments(count: int) -> dict[str, Any]:
    step = 2**22
    events = [
        one
        for number in range(count)
        for one in (event("segment_alloc", step * number, 2**21), event("alloc", step * number, 2**21))
    ]
    held = [segment([(2**21, "active_allocated")], 2**21, step * number) for number in range(count)]
    return snapshot(events, segments=held)


def mapped(count: int) -> dict[str, Any]:
    """An expandable segment whose pages are mapped and unmapped in any order."""
    order = list(range(count))
    random.Random(3).shuffle(order)
    page = 2**21
    events = [event("segment_map", page * number, page) for number in order]
    events += [event("segment_unmap", page * number, page) for number in reversed(order)]
    return snapshot(events, segments=[])


def many_devices(count: int) -> dict[str, Any]:
    traces = [paired(max(1, count // 128)) for _ in range(128)]
    return snapshot(*traces, segments=[segment() | {"device": device} for device in range(128)])


def only_segments(count: int) -> dict[str, Any]:
    blocks = ((512, ("active_allocated", "inactive")[number % 2]) for number in range(count))
    return snapshot([], segments=[segment(blocks)])


def saved(count: int) -> dict[str, Any]:
    rows = [[START + 512 * (number % 50), 512, 10 + number, "MulBackward0", "a.b", "mul", 0] for number in range(count)]
    return snapshot(paired(count // 4)) | {"ligerprof_saved_tensors": rows}


def sized(size_of: Callable[[int], int]) -> Shape:
    return lambda count: snapshot(
        grown(event("alloc", 2**31 * (number % 500), size_of(number)) for number in range(count))
    )


def deep(depth: int, distinct: int) -> Shape:
    stacks = [[frame(number * depth + level) for level in range(depth)] for number in range(distinct)]
    return lambda count: snapshot(paired(count, lambda number: stacks[number % distinct]))


def stack_of(number: int) -> list[Event]:
    return [frame(number), frame(number // 100), *FRAMES]


SHAPES: dict[str, Shape] = {
    "many stacks": lambda count: snapshot(paired(count, stack_of)),
    "many stacks, all kept": lambda count: snapshot(
        grown(event("alloc", 512 * number, 512, stack_of(number)) for number in range(count))
    ),
    "deep stacks": deep(400, 100),
    "few stacks": deep(5, 3),
    "long strings": lambda count: snapshot(
        paired(count, lambda number: [{"filename": "f" * 5000 + str(number), "name": "g" * 5000, "line": 1}])
    ),
    "native frames": lambda count: snapshot(
        paired(count, lambda number: [{"filename": "??", "name": f"MmBackward{number}::apply", "line": 0}])
    ),
    "many stamps": lambda count: stamps(count, lambda _: "forward", lambda number: f"model.layers.{number}.mlp"),
    "many phases": lambda count: stamps(
        count, lambda number: ("forward", "backward", "optimizer")[number % 3], lambda _: "model.layers.0"
    ),
    "user metadata, not ours": lambda count: snapshot(
        grown(event("alloc", 512 * number, user_metadata=f"note {number}") for number in range(count))
    ),
    "one segment, never freed": kept,
    "all freed at once": all_freed_at_once,
    "fragmented": fragmented,
    "one address reused": lambda count: snapshot(paired(count)),
    "only frees, any order": cut_ends,
    "damaged order": damaged,
    "only free_requested": lambda count: snapshot(
        grown(one for number in range(count) for one in (event("alloc", 512 * number), freed(512 * number)[0]))
    ),
    "many annotated steps": steps,
    "many passes": passes,
    "out of memory again and again": failures,
    "many segments": segments,
    "mapped in any order": mapped,
    "many devices": many_devices,
    "many streams": lambda count: snapshot(
        grown({**event("alloc", 512 * number), "stream": number} for number in range(count))
    ),
    "only segments": only_segments,
    "saved tensors": saved,
    "huge sizes": sized(lambda number: 2**31 - number),
    "zero sizes": sized(lambda _: 0),
    "every size once": sized(lambda number: number),
    "unknown actions": lambda count: snapshot(grown(event(f"action {number}", number) for number in range(count))),
}

COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "text": lambda file, _: ["explain", str(file)],
    "json": lambda file, _: ["explain", str(file), "--json"],
    "stacks": lambda file, _: ["explain", str(file), "--stacks"],
    "html": lambda file, folder: ["explain", str(file), "--html", str(folder / "page.html"), "--force"],
    "diff": lambda file, _: ["diff", str(file), str(file)],
    "folder": lambda file, _: ["explain", str(file.parent)],
}
# files that a command reads
READS = {"diff": 2, "folder": 2}


def pickled(shape: Shape, size_bytes: int) -> bytes:
    """The shape at the largest scale that has at most so many bytes."""
    count = 1000
    content = pickle.dumps(shape(count), 4)
    for _ in range(6):
        count = max(1, int(count * size_bytes / len(content) * 0.99))
        content = pickle.dumps(shape(count), 4)
        if 0.9 * size_bytes < len(content) <= size_bytes:
            break
    return content


def run(arguments: list[str], seconds: int) -> dict[str, Any]:
    """Processor seconds and peak memory of a command, and how it ended."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.run(
        [sys.executable, "-c", MEASURED, str(seconds), "-m", "ligerprof", *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=environment,
    )
    found: dict[str, Any] = json.loads(process.stdout)
    return found | {
        "is_traceback": "Traceback" in process.stderr,
        "error": process.stderr[-200:] if found["exit"] not in (0, 1) else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--packed", action="store_true", help="Ten times as large, and compressed with xz.")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    print("| shape | MB | " + " | ".join(f"{name}, s | MiB" for name in options.commands) + " | limit, MiB |")
    print("|---|" + "---:|" * (2 * len(options.commands) + 2))
    for name in options.shapes:
        with tempfile.TemporaryDirectory() as scratch:
            content = pickled(SHAPES[name], int(options.megabytes * 1e6 * (10 if options.packed else 1)))
            folder = Path(scratch) / "ranks"
            folder.mkdir()
            files = [folder / f"rank{rank}.pickle{'.xz' if options.packed else ''}" for rank in range(2)]
            files[0].write_bytes(lzma.compress(content, preset=1) if options.packed else content)
            shutil.copy(files[0], files[1])
            unpacked_bytes = len(content)
            del content
            limit_mib = round((3 * unpacked_bytes + 256 * MIB) / MIB)
            row: dict[str, Any] = {"shape": name, "unpacked_bytes": unpacked_bytes, "limit_mib": limit_mib}
            for command in options.commands:
                reads = READS.get(command, 1)
                found = run(COMMANDS[command](files[0], Path(scratch)), PATIENCE * MOST_SECONDS * reads)
                is_over = found["seconds"] > MOST_SECONDS * reads or found["mib"] > limit_mib * reads
                row[command] = found | {"is_over": is_over or found["is_traceback"] or found["exit"] not in (0, 1)}
            rows.append(row)
            cells = (
                f"{row[each]['seconds']}{' !' if row[each]['is_over'] else ''} | {row[each]['mib']}"
                for each in options.commands
            )
            print(f"| {name} | {unpacked_bytes / 1e6:.1f} | {' | '.join(cells)} | {limit_mib} |", flush=True)
            options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
