"""Run the answers of `fit -- COMMAND` and `advise -- COMMAND` on a GPU: they fit, and one step larger does not.

    python benchmarks/unchanged_programs/make.py DATA
    python benchmarks/command_answers.py DATA benchmarks/results/command-answers-h200.jsonl

The searches run without the GPU, several at a time; then each answer, and the next larger value or the command without
the plan, runs under the same limit on the GPU (peak.py sets it as torch.cuda.set_per_process_memory_fraction does).
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
        "{programs}/trainer_arguments.py --output_dir {out} --max_steps 3 --bf16 --report_to none",
    ),
    "lightning": ("fit", "{programs}/lightning_own.py"),
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
            "{programs}/trainer_arguments.py --output_dir {out} --max_steps 3 --report_to none"
            " --per_device_train_batch_size 16"
        ),
    ),
}


def words_of(name: str, data: Path, out: str) -> list[str]:
    text = QUESTIONS[name][1].format(data=data.resolve(), programs=PROGRAMS, out=out)
    return [sys.executable, *shlex.split(text)]


def search(name: str, data: Path, out: str, at_once: int) -> dict[str, Any]:
    """Runs the search of one command without a GPU."""
    began = time.monotonic()
    ours = [sys.executable, "-m", "ligerprof", QUESTIONS[name][0], "--json", "--gpu", "h200", "--steps", str(STEPS)]
    ours += ["--memory-limit", f"{LIMIT_BYTES}B", "--at-once", str(at_once), "--", *words_of(name, data, out)]
    environment = {**os.environ, **QUIET, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(ours, env=environment, capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"name": name, "search": QUESTIONS[name][0], "exit_code": done.returncode}
    row["seconds"] = round(time.monotonic() - began, 1)
    if done.stdout:
        row["found"] = json.loads(done.stdout)
    else:
        row["error"] = done.stderr.splitlines()[-5:]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--searches", type=int, default=4, help="searches at a time")
    parser.add_argument("--at-once", type=int, default=3, help="simulated runs of a search at a time")
    parser.add_argument("--on-gpu", type=int, default=5, help="programs on the GPU at a time")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(QUESTIONS)
    lock = threading.Lock()
    about: dict[str, Any] = {"date": dt.datetime.now(dt.UTC).date().isoformat(), "versions": versions()}

    with tempfile.TemporaryDirectory() as out, ThreadPoolExecutor(options.searches) as pool:
        rows = list(pool.map(lambda name: search(name, options.data, out, options.at_once), names))
        for row in rows:
            print(row["name"], row["exit_code"], row["seconds"], row.get("error"), flush=True)

        import torch

        about["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
        answered = [row for row in rows if row.get("found", {}).get("plan")]
        commands = [
            (row, kind, words)
            for row in answered
            for kind, words in (("answer", row["found"]["plan"]["command"]), ("larger", larger(row)))
        ]

        def on_gpu(each: tuple[dict[str, Any], str, list[str]]) -> None:
            row, kind, words = each
            row[kind] = measure(words, row["found"]["plan"]["environment"] if kind == "answer" else {})

        if torch.cuda.is_available():
            with ThreadPoolExecutor(options.on_gpu) as workers:
                list(workers.map(on_gpu, commands))
    with lock, options.results.open("a") as file:
        for row in rows:
            file.write(json.dumps({**row, **about}) + "\n")
            answer, larger_one = row.get("answer", {}), row.get("larger", {})
            print(row["name"], "answer", answer.get("exit_code"), "larger runs out:", larger_one.get("ran_out"))


if __name__ == "__main__":
    main()
