"""Measure what `ligerprof run --steps` costs each script of run_scripts/: before, in and after the recorded steps.

    python benchmarks/script_overhead.py benchmarks/results/script-overhead-h200.json

The scripts do not know ligerprof. Each runs once, in a process forked from one that has imported torch and
transformers. Its training loop is longer than in the file, and what begins a step of it also switches the recording:
blocks of steps take turns (recording_turns.py), `outside` as the steps before the chosen ones, `inside` as these,
`after` as the steps after them, and `off` without a recording, twice in a round. Work between steps that would only add
noise (evaluation, checkpoints, long generations) is shortened. The scripts that run out of memory are measured in the
steps that fit.

The next scripts start while one is timed, on other processors, and wait for it to end before their own loop begins.
Each ratio is the median of the rounds with its 95 % interval (bootstrap). `noise` compares the two blocks without a
recording in the same way: what a script's measurement cannot distinguish. `pooled` has the median of the scripts.
"""

import argparse
import datetime as dt
import fcntl
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from recording_turns import OFF, Round, keep_on, over_each_other, over_off, turns

SCRIPTS = Path(__file__).parent / "run_scripts"
# how a script's process is timed, as JSON: a spawned child reads it too
TIMING = "SCRIPT_OVERHEAD"
WARM_UP = 8
BLOCK_SECONDS, FEWEST_STEPS, MOST_STEPS = 0.12, 4, 60
AT_ONCE = 3
WAYS = ("outside", "inside", "after")
GATE = 0.02


@dataclass(frozen=True, kw_only=True)
class Script:
    """How a script's loop is timed.

    Attributes:
        loop: the head of its training loop in the file.
        timed: the head with which it begins timed steps.
        others: further replacements in the file.
    """

    loop: str
    timed: str
    others: tuple[tuple[str, str], ...] = ()


def _counted(number: int, name: str = "_", *others: tuple[str, str]) -> Script:
    return Script(loop=f"for {name} in range({number}):", timed=f"for {name} in timed():", others=others)


CASES = {
    # those that compile or start slowly come first: the others are timed meanwhile
    "compiled": _counted(24),
    "compiled_in_place": _counted(20),
    "deepspeed_zero3": _counted(8),
    "spawned": _counted(5),
    "accelerated": Script(loop="for batch in loader:", timed="for batch in timed(loader, every=4):"),
    "adversarial": _counted(10, "step"),
    "full_shard": _counted(8),
    "functional": _counted(5),
    "generating": _counted(4, "_", ("max_new_tokens=32", "max_new_tokens=8")),
    "graphs": _counted(10),
    "image": Script(
        loop="for batch, labels in loader:",
        timed="for batch, labels in timed(loader):",
        others=(
            # without the start of workers and an evaluation every ten steps
            ("for _ in range(2):", "for _ in range(1):"),
            ("num_workers=2,", "num_workers=2, sampler=torch.utils.data.RandomSampler(images, True, 10**6),"),
        ),
    ),
    "leaking": _counted(10, "_", ("torch.rand(512, 1024", "torch.rand(16, 1024")),
    "lora": _counted(20),
    "mixture": _counted(12),
    "oom_caught": _counted(6, "step"),
    "oom_uncaught": _counted(10, "step", ("256 if step < 6 else 4096", "256")),
    "plain": _counted(40),
    "preference": _counted(5),
    "trainer": Script(
        loop='print("STEP", time.perf_counter() - self.begin)',
        timed="_arguments[2].should_training_stop = next(STEPS, None) is None",
        others=(
            ("class Clock", "STEPS = timed()\n\n\nclass Clock"),
            ("max_steps=20,", "max_steps=10**6,"),
            ("eval_steps=10,", "eval_steps=10**6,"),
            ("save_steps=10,", "save_steps=10**6,"),
            ("(160, 256)", "(4800, 256)"),
        ),
    ),
    "vision": _counted(6),
}
# what makes a script run without a device, with small tensors
ON_CPU = (
    (r"\.cuda\((non_blocking=True)?\)", ""),
    (r"bf16=True", "use_cpu=True"),
    (r'"cuda"', '"cpu"'),
    (r'"nccl"', '"gloo"'),
    (r"torch\.cuda\.device_count\(\)", "1"),
    (r"torch\.cuda\.(max_memory_allocated|synchronize|set_device|get_device_properties)\(", "(lambda *_: 0)("),
    (r"torch\.cuda\.set_per.*", ""),
    (r"\b(16000|32000|50257)\b", "100"),
    (r"\b(960|1024|1408|2048|2816|4096)\b", "64"),
    (r"\b(256|384|512)\b", "48"),
)
RANKS = {**dict.fromkeys(("RANK", "LOCAL_RANK"), "0"), "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
LAUNCHED = ("deepspeed_zero3", "full_shard")
# one script ends with a code of its own
EXIT_CODES = {"functional": 5}


def timed(items: Iterable[Any] | None = None, every: int = 1) -> Iterator[Any]:
    """The items of a loop (numbers, if there are none), again and again, until the steps of `every` items are timed."""
    steps, count = _steps(), 0
    while True:
        for item in range(1_000_000) if items is None else items:
            if count % every == 0 and next(steps, None) is None:
                return
            count += 1
            yield item


def _steps() -> Iterator[bool]:
    """One item for each step: first a warm-up, then the turns, whose rounds are written to a file."""
    timing = json.loads(os.environ[TIMING])
    synchronize = torch.cuda.synchronize if timing["device"] == "cuda" else lambda: None
    for _ in range(WARM_UP):
        yield True
    with Path(timing["lock"]).open("w") as lock:
        synchronize()
        fcntl.flock(lock, fcntl.LOCK_EX)
        keep_on(timing["cores"])
        rounds: list[Round] = []
        yield True
        synchronize()
        begin = time.perf_counter()
        for _ in range(FEWEST_STEPS):
            yield True
        synchronize()
        step = (time.perf_counter() - begin) / FEWEST_STEPS
        steps = min(max(ceil(BLOCK_SECONDS / step), FEWEST_STEPS), MOST_STEPS)
        for _ in turns(timing["ways"], rounds, seconds=timing["seconds"], steps=steps, synchronize=synchronize):
            yield True
        Path(timing["results"]).write_text(json.dumps(_result(rounds, timing["ways"], steps)), encoding="utf-8")


def _result(rounds: list[Round], ways: list[str], steps: int) -> dict[str, Any]:
    """The figures of one script."""
    alone = [each[name] for each in rounds for name in OFF]

    def ratios(clock: str) -> dict[str, Any]:
        found = over_off(rounds, clock)
        return {"noise": over_each_other(rounds, clock, *OFF), **{way: found[way] for way in ways}}

    return {
        "step_ms": round(statistics.median(block.wall for block in alone) * 1e3, 3),
        "rounds": len(rounds),
        "steps": steps,
        "wall": ratios("wall"),
        "cpu": ratios("cpu"),
    }


def timed_source(name: str, device: str) -> str:
    """The source of a script with its timed loop."""
    case, text = CASES[name], (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    for old, new in ((case.loop, case.timed), *case.others):
        if old not in text:
            raise SystemExit(f"{name}: no {old!r} in the script")
        text = text.replace(old, new, 1)
    if device == "cpu":
        for old, new in ON_CPU:
            text = re.sub(old, new, text)
    return f"from script_overhead import timed\n{text}"


class Process:
    """A forked process that runs a script."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace, number: int) -> None:
        self.name, self._results, self._log = name, folder / f"{name}.json", folder / f"{name}.log"
        timing = {
            "device": options.device,
            "ways": options.ways,
            "seconds": options.seconds,
            "lock": str(folder / "lock"),
            "results": str(self._results),
            "cores": options.timed_cores,
        }
        script = folder / f"{name}.py"
        script.write_text(timed_source(name, options.device), encoding="utf-8")
        self._deadline = time.monotonic() + options.limit
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            os.environ.update({TIMING: json.dumps(timing), "OMP_NUM_THREADS": "1"})
            # on few processors, the threads of an operation wait for each other
            torch.set_num_threads(1)
            if name in LAUNCHED:
                os.environ.update(RANKS, MASTER_PORT=str(options.port + number))
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.sched_setaffinity(0, options.other_cores)
            sys.argv = [str(script)]
            runpy.run_path(str(script), run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def ended(self) -> bool:
        """Whether it has ended; it is stopped if it takes too long."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid and time.monotonic() > self._deadline:
            os.kill(self.pid, 9)
        self._exit_code = os.waitstatus_to_exitcode(status)
        return bool(pid)

    def result(self) -> dict[str, Any]:
        """Its figures."""
        if self._exit_code != EXIT_CODES.get(self.name, 0) or not self._results.is_file():
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-600:]
            return {"script": self.name, "error": f"ended with {self._exit_code}: {tail}"}
        return {"script": self.name, **json.loads(self._results.read_text(encoding="utf-8"))}


def pooled(scripts: list[dict[str, Any]], ways: list[str]) -> dict[str, Any]:
    """The median of the scripts' ratios, and which of them are above the gate outside the recorded steps."""
    measured = [script for script in scripts if "wall" in script]
    return {
        **{way: round(statistics.median(each["wall"][way]["median"] for each in measured), 4) for way in ways},
        "noise": round(statistics.median(abs(each["wall"]["noise"]["median"]) for each in measured), 4),
        "above_gate": [
            (each["script"], way)
            for each in measured
            for way in ("outside", "after")
            if way in ways and each["wall"][way]["low"] > GATE
        ],
    }


def measure(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """The figures of each script, in the order of their ends."""
    waiting, running = list(enumerate(options.only)), list[Process]()
    while waiting or running:
        while waiting and len(running) < options.at_once:
            number, name = waiting.pop(0)
            running.append(Process(name, folder, options, number))
        time.sleep(0.05)
        for process in [each for each in running if each.ended()]:
            running.remove(process)
            yield process.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=8, help="Rounds of a script begin until then.")
    parser.add_argument("--limit", type=float, default=240, help="Seconds after which a script is stopped.")
    parser.add_argument("--cores", type=int, default=1, help="Processors of the script that is timed.")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="Scripts that run; one of them is timed.")
    parser.add_argument("--device", default="cuda", help="`cpu` with `--ways phases` tries the scripts that run there")
    parser.add_argument("--port", type=int, default=29600)
    options = parser.parse_args()
    here = Path(__file__).parent
    # spawned processes import this file
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (here, here.parent, os.environ.get("PYTHONPATH", ""))))
    cores = sorted(os.sched_getaffinity(0))
    options.timed_cores = cores[-options.cores :]
    # with one between them, which may share a core's units
    options.other_cores = cores[: -options.cores - 1] or cores
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
    gpu = None
    if options.device == "cuda":
        # not by torch: a process that has used the device cannot fork others that do
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    result: dict[str, Any] = {
        "schema": 2,
        "kind": "script_overhead",
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "gpu": gpu,
        "torch": torch.__version__,
        "processors": len(cores),
        "timed_on": options.cores,
        "scripts": [],
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for found in measure(options, Path(folder)):
            result["scripts"].append(found)
            print(json.dumps(found), flush=True)
            if any("wall" in script for script in result["scripts"]):
                result["pooled"] = pooled(result["scripts"], options.ways)
            result["seconds"] = round(time.monotonic() - begin)
            options.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result.get("pooled")))


if __name__ == "__main__":
    main()
