"""Measure what `ligerprof run --steps` costs each script of run_scripts/: before, inside and after the recorded steps.

    python benchmarks/script_overhead.py benchmarks/results/script-overhead-h200.json --turns 2

The scripts do not know ligerprof. Each turn runs a script alone, under the recording, and alone again, in an order that
is drawn anew; each time in a process forked from one that has imported torch and transformers, but not used the device.
So that there are enough steps, the training loop of a script is longer than in the file, and it is timed from outside:
the loop's iterator synchronizes with the device before each step.

`before`, `inside` and `after` are the median step of these parts over the same steps of the script alone, the mean of
both processes. `again` is one of these over the other: how far it is from 0 is what a turn cannot tell. `inside_after`
and `before_after` compare parts of one process, which ran close in time, less what they differ by when alone.
Scripts that run out of memory are left out.
"""

import argparse
import datetime as dt
import json
import os
import random
import runpy
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ligerprof.runs.recording.door import open_door
from ligerprof.runs.recording.settings import Mode, Settings, Steps

SCRIPTS = Path(__file__).parent / "run_scripts"
SECONDS, DEVICE = "STOPWATCH_SECONDS", "STOPWATCH_DEVICE"


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script whose loop is made longer.

    Attributes:
        loop: the head of its training loop in the file.
        longer: the head with more steps; `timed` measures each.
        first: the first recorded step.
        last: the last recorded step.
        others: further replacements in the file.
    """

    loop: str
    longer: str
    steps: int = 60
    first: int = 35
    last: int = 44
    others: tuple[tuple[str, str], ...] = ()


def _counted(number: int, name: str = "_", **options: Any) -> Script:
    head, steps = f"for {name} in range({number}):", options.get("steps", Script.steps)
    return Script(loop=head, longer=f"for {name} in timed(range({steps})):", **options)


CASES = {
    "accelerated": Script(
        loop="for batch in loader:",
        longer="for batch in timed(loader, every=4):",
        others=(("(256, 256)", "(960, 256)"),),
    ),
    "adversarial": _counted(10, "step"),
    "compiled": _counted(24),
    "compiled_in_place": _counted(20),
    "deepspeed_zero3": _counted(8),
    "full_shard": _counted(8),
    "functional": _counted(5),
    "generating": _counted(4, steps=30, first=14, last=20),
    "graphs": _counted(10),
    "image": Script(
        loop="for batch, labels in loader:",
        longer="for batch, labels in timed(loader):",
        others=(("for _ in range(2):", "for _ in range(6):"),),
    ),
    "leaking": _counted(10),
    "lora": _counted(20),
    "mixture": _counted(12),
    "plain": _counted(40),
    "preference": _counted(5),
    "spawned": _counted(5),
    "trainer": Script(
        loop="max_steps=20,",
        longer="max_steps=60,",
        others=(("(160, 256)", "(480, 256)"), ('print("STEP", time.perf_counter() - self.begin)', "note(self.begin)")),
    ),
    "vision": _counted(6),
}


def synchronize() -> None:
    if os.environ[DEVICE] == "cuda":
        torch.cuda.synchronize()


def note(begin: float) -> None:
    """Write down the seconds of a step."""
    with Path(os.environ[SECONDS]).open("a", encoding="utf-8") as lines:
        lines.write(f"{time.perf_counter() - begin}\n")


def timed(items: Iterable[Any], every: int = 1) -> Iterator[Any]:
    """The items of a loop; each time `every` of them have been used, the seconds since the last time are noted."""
    synchronize()
    begin = time.perf_counter()
    for count, item in enumerate(items, 1):
        yield item
        if count % every == 0:
            synchronize()
            note(begin)
            begin = time.perf_counter()


def lengthened(name: str, device: str) -> str:
    """The source of a script with its longer, timed loop."""
    case, text = CASES[name], (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    for old, new in ((case.loop, case.longer), *case.others):
        if old not in text:
            raise SystemExit(f"{name}: no {old!r} in the script")
        text = text.replace(old, new, 1)
    if device == "cpu":
        text = text.replace(".cuda()", "").replace('"cuda"', '"cpu"').replace("torch.cuda.max_memory_allocated()", "0")
    return f"from benchmarks.script_overhead import note, timed\n{text}"


def run(name: str, folder: Path, way: str, device: str, port: int) -> list[float]:
    """The seconds of each step of a script, in a forked process."""
    script, seconds = folder / f"{name}.py", folder / f"{way}.txt"
    script.write_text(lengthened(name, device), encoding="utf-8")
    child = os.fork()
    if not child:
        status = 1
        try:
            os.environ.update({SECONDS: str(seconds), DEVICE: device})
            if name in ("deepspeed_zero3", "full_shard"):
                ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
                os.environ.update(ranks, WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            if way == "run":
                steps = Steps(first=CASES[name].first, last=CASES[name].last)
                settings = Settings(mode=Mode.RUN, output=folder / "recording", steps=steps)
                os.environ.update(settings.to_environment())
                open_door()
            sys.argv = [str(script)]
            os.dup2(2, 1)
            runpy.run_path(str(script), run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    # one script ends with a code of its own
    if ended and name != "functional":
        raise RuntimeError(f"{way}: the process ended with {ended}")
    return [float(line) for line in seconds.read_text(encoding="utf-8").split()]


def parts_of(case: Script, seconds: list[float]) -> dict[str, float]:
    """Median steps before, inside and after the recorded steps, without those that switch or write."""
    before, inside, after = seconds[5 : case.first - 2], seconds[case.first + 1 : case.last], seconds[case.last + 2 :]
    return {"before": statistics.median(before), "inside": statistics.median(inside), "after": statistics.median(after)}


def measure(name: str, turns: int, device: str, port: int) -> dict[str, Any]:
    """The figures of a script."""
    order, ratios = random.Random(name), []
    milliseconds: list[float] = []
    for turn in range(turns):
        parts: dict[str, dict[str, float]] = {}
        for way in order.sample(("alone", "run", "again"), 3):
            with tempfile.TemporaryDirectory() as folder:
                parts[way] = parts_of(CASES[name], run(name, Path(folder), way, device, port + turn))
        base = {part: (parts["alone"][part] + parts["again"][part]) / 2 for part in parts["alone"]}
        milliseconds.append(statistics.mean(base.values()) * 1e3)
        found = {part: parts["run"][part] / base[part] - 1 for part in base}
        found["again"] = statistics.mean(parts["again"].values()) / statistics.mean(parts["alone"].values()) - 1
        for part in ("before", "inside"):
            found[f"{part}_after"] = parts["run"][part] / parts["run"]["after"] / (base[part] / base["after"]) - 1
        ratios.append(found)
    return {
        "script": name,
        "step_ms": round(statistics.median(milliseconds), 3),
        **{part: [round(turn[part], 4) for turn in ratios] for part in ratios[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--device", default="cuda", help="`cpu` tries the scripts that run there: nothing is recorded")
    parser.add_argument("--port", type=int, default=29600)
    options = parser.parse_args()
    root = str(Path(__file__).parents[1])
    # spawned processes import this file
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, root)
    import accelerate  # noqa: F401 - imported once, for all processes
    import transformers

    for imported in (
        "LlamaForCausalLM",
        "GPT2LMHeadModel",
        "MixtralForCausalLM",
        "ViTForImageClassification",
        "Trainer",
    ):
        getattr(transformers, imported)
    result: dict[str, Any] = {
        "schema": 1,
        "kind": "script_overhead",
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "processors": os.cpu_count(),
        "scripts": [],
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        try:
            found = measure(name, options.turns, options.device, options.port)
        except Exception as error:  # one script must not end the others
            found = {"script": name, "error": f"{type(error).__name__}: {error}"[-500:]}
        result["scripts"].append(found)
        print(json.dumps(found), flush=True)
        options.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.device == "cuda":
        # only now: a process that has used the device cannot fork others that do
        result["gpu"] = torch.cuda.get_device_name()
        options.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
