"""Run the answers of `fit -- COMMAND` and `advise -- COMMAND` on a GPU: they fit, and one step larger does not.

    python benchmarks/unchanged_programs/make.py DATA
    python benchmarks/command_answers.py DATA benchmarks/results/command-answers-h200.jsonl

The searches run without the GPU, several at a time, each on two cores of its own. As each ends, its answer and the next
larger value, or the command without the plan, run under the same limit on the GPU (peak.py sets it as
torch.cuda.set_per_process_memory_fraction does).
"""

import argparse
import datetime as dt
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from unchanged_programs import PROGRAMS, QUIET, versions

LIMIT_BYTES = 22 * 2**30
STEPS = 3
# name: the command's words after Python, and the search
QUESTIONS = {
    "sft-1b": (
        "fit",
        "-m trl.scripts.sft --config {data}/configs/sft-full-1b-liger.yaml --gradient_checkpointing false",
    ),
    "dpo-lora-1b": (
        "fit",
        "-m trl.scripts.dpo --config {data}/configs/dpo-lora-1b.yaml --gradient_checkpointing false",
    ),
    "reward-qwen3": ("fit", "-m trl.scripts.reward --config {data}/configs/reward-pairs.yaml"),
    "trainer-arguments": (
        "fit",
        "{programs}/trainer_arguments.py --output_dir {out} --max_steps 3 --bf16 --report_to none --save_strategy no",
    ),
    "lightning": ("fit", "{programs}/lightning_own.py --batch 16"),
    "advise-sft-1b": (
        "advise",
        (
            "-m trl.scripts.sft --config {data}/configs/sft-full-1b-liger.yaml --gradient_checkpointing false"
            " --per_device_train_batch_size 16"
        ),
    ),
    "advise-dpo": (
        "advise",
        (
            "-m trl.scripts.dpo --config {data}/configs/dpo-lora-1b.yaml --use_peft false --dtype bfloat16"
            " --per_device_train_batch_size 8 --gradient_accumulation_steps 1"
        ),
    ),
    "advise-trainer": (
        "advise",
        (
            "{programs}/trainer_arguments.py --output_dir {out} --max_steps 3 --report_to none --save_strategy no"
            " --per_device_train_batch_size 16"
        ),
    ),
}


def words_of(name: str, data: Path, out: str) -> list[str]:
    text = QUESTIONS[name][1].format(data=data.resolve(), programs=PROGRAMS, out=out)
    return [sys.executable, *shlex.split(text)]


def search(name: str, data: Path, out: str, at_once: int, seconds: float) -> dict[str, Any]:
    """Runs the search of one command without a GPU."""
    began = time.monotonic()
    ours = [sys.executable, "-m", "ligerprof", QUESTIONS[name][0], "--json", "--gpu", "h200", "--steps", str(STEPS)]
    ours += ["--memory-limit", f"{LIMIT_BYTES}B", "--at-once", str(at_once), "--", *words_of(name, data, out)]
    environment = {**os.environ, **QUIET, "CUDA_VISIBLE_DEVICES": ""}
    # cores of its own, so that its seconds can be compared
    cores = sorted(os.sched_getaffinity(0))
    first = at_once * list(QUESTIONS).index(name) % max(len(cores) - at_once, 1)
    own = cores[first : first + at_once]
    row: dict[str, Any] = {"name": name, "search": QUESTIONS[name][0]}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    pinned = ["taskset", "-c", ",".join(map(str, own)), *ours]
    with subprocess.Popen(pinned, env=environment, text=True, **pipes) as started:
        try:
            output, errors = started.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # it ends its trials
            started.terminate()
            output, errors = started.communicate()
    row |= {"exit_code": started.returncode, "cores": len(own), "seconds": round(time.monotonic() - began, 1)}
    if output:
        row["found"] = json.loads(output)
    else:
        row["error"] = errors.splitlines()[-8:]
    return row


def larger(row: dict[str, Any]) -> list[str]:
    """The command that ought not to fit: with the next larger value, or without the plan."""
    found = row["found"]
    if row["search"] == "advise" or found["next_value"] is None:
        return list(found["command"])
    words, key = list(found["plan"]["command"]), f"--{found['key']}"
    if key in words:
        words[words.index(key) + 1] = str(found["next_value"])
        return words
    return [*words, key, str(found["next_value"])]


def measure(words: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Runs a command on the GPU under the limit."""
    program = [each for each in words[1:] if each != "-m"]
    variables = {**os.environ, **QUIET, **environment, "MEMORY_LIMIT_BYTES": str(LIMIT_BYTES)}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "peak.py"), *program],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    row: dict[str, Any] = {"command": words[1:], "exit_code": done.returncode}
    row["seconds"] = round(time.monotonic() - began, 1)
    row["ran_out"] = "OutOfMemoryError" in done.stderr
    for line in done.stderr.splitlines():
        if line.startswith("TORCH-PEAK "):
            row |= json.loads(line.removeprefix("TORCH-PEAK "))
    if done.returncode and not row["ran_out"]:
        row["error"] = done.stderr.splitlines()[-8:]
    return row


def about_this_machine() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    return {"gpu": gpu, "date": dt.datetime.now(dt.UTC).date().isoformat(), "versions": versions()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--searches", type=int, default=5, help="commands at a time")
    parser.add_argument("--at-once", type=int, default=2, help="simulated runs of a search at a time, and its cores")
    parser.add_argument("--seconds", type=float, default=600, help="time limit of one search")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(QUESTIONS)
    about, lock = about_this_machine(), threading.Lock()

    def answer(name: str) -> None:
        row = search(name, options.data, out, options.at_once, options.seconds)
        found = row.get("found", {})
        if about["gpu"] != "cpu" and found.get("plan"):
            plan = found["plan"]
            # one after the other: both may write to the same folder
            row["answer"] = measure(plan["command"], plan["environment"])
            row["larger"] = measure(larger(row), {})
        with lock, options.results.open("a") as file:
            file.write(json.dumps({**row, **about}) + "\n")
            said = {key: found.get(key) for key in ("value", "next_value", "bounded_by", "changes")}
            print(name, row["exit_code"], row["seconds"], said, row.get("error"), flush=True)
            for kind in ("answer", "larger"):
                measured = row.get(kind, {})
                print(f"    {kind}: exit {measured.get('exit_code')}, ran out: {measured.get('ran_out')}", flush=True)

    with tempfile.TemporaryDirectory() as out, ThreadPoolExecutor(options.searches) as pool:
        list(pool.map(answer, names))


if __name__ == "__main__":
    main()
