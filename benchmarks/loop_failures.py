"""Post-training loops that run out of memory, and run again with the first suggestion of `ligerprof run`.

    python benchmarks/unchanged_programs/make.py DATA --empty
    python benchmarks/loop_failures.py DATA RESULT.jsonl [--device simulated] [--only NAME…] [--jobs N]

Each program runs without a limit, then with a share of what it reserved, where it has to fail, and then once more with
the first suggestion and the same limit. Lines of a suggestion are carried out as they are printed: arguments of TRL's
trainers in a changed configuration, others by a flag of own_loops.py.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

PROGRAMS = Path(__file__).parent / "unchanged_programs"
SECONDS = 280
COMMON: dict[str, Any] = {
    "max_steps": 2,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-5,
    "bf16": True,
    "dtype": "bfloat16",
    "save_strategy": "no",
    "logging_steps": 1,
    "report_to": "none",
    "seed": 1,
}
ONLINE = {"reward_funcs": ["get_soft_overlong_punishment"], "num_generations": 8}


@dataclass(frozen=True)
class Failure:
    """A program, and the percentage of its reserved memory that it gets.

    Attributes:
        data: of TRL's trainers: the model and the data set; none for a program of own_loops.py.
        options: of the trainer's configuration.
        flags: of own_loops.py.
    """

    name: str
    percent: int
    data: tuple[str, str] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, data: Path, folder: Path) -> list[str]:
        """The program under torch's own counters."""
        peak = [sys.executable, str(PROGRAMS / "peak.py")]
        if self.data is None:
            return [*peak, str(PROGRAMS / "own_loops.py"), self.name, *self.flags]
        model, rows = self.data
        config = {"model_name_or_path": str(data / model), "dataset_name": str(data / rows), **COMMON, **self.options}
        if teacher := config.get("teacher_model_name_or_path"):
            config["teacher_model_name_or_path"] = str(data / teacher)
        file = folder / f"{time.monotonic_ns()}.yaml"
        file.write_text(yaml.safe_dump({**config, "output_dir": str(folder / "out")}, sort_keys=False))
        return [*peak, f"trl.scripts.{self.name.partition('-')[0]}", "--config", str(file)]


def trl(name: str, percent: int, model: str, rows: str, **options: Any) -> Failure:
    return Failure(name, percent, (model, rows), options)


FAILURES = (
    trl(
        "grpo-long-generation",
        65,
        "smol",
        "prompts",
        **ONLINE,
        max_completion_length=128,
        per_device_train_batch_size=4,
        steps_per_generation=128,
    ),
    trl(
        "grpo-update",
        75,
        "smol",
        "prompts",
        **ONLINE,
        max_completion_length=64,
        per_device_train_batch_size=32,
        gradient_checkpointing=False,
    ),
    trl("dpo-fp32-models", 80, "smol", "preference", max_length=512, per_device_train_batch_size=2, dtype="float32"),
    trl("dpo-batch", 75, "smol", "preference", max_length=1024, per_device_train_batch_size=32),
    trl(
        "dpo-evaluation",
        75,
        "smol",
        "preference",
        max_length=1024,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=16,
        eval_strategy="steps",
        eval_steps=1,
    ),
    trl(
        "kto-batch", 75, "smol", "judged", max_length=1024, per_device_train_batch_size=16, gradient_checkpointing=False
    ),
    trl(
        "reward-activations",
        75,
        "qwen3",
        "pairs",
        max_length=1024,
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
    ),
    trl(
        "distillation-states",
        85,
        "smol",
        "prompts",
        teacher_model_name_or_path="smol",
        max_completion_length=64,
        per_device_train_batch_size=32,
    ),
    Failure("growing-cache", 88),
    Failure("logged-tensors", 60),
    Failure("scored-with-graph", 70),
    Failure("doubled-logits", 75),
    Failure("fp32-reference", 88),
    Failure("evaluation", 75),
)
# a line of a suggestion for a trainer: `key=value,`, or `key=... // 2,` of what it is
_ARGUMENT = re.compile(r"(\w+)=(\.\.\. // 2|\.\.\. \* 2|\"[^\"]*\"|\{[^}]*\}|[^,]+),")
_DEFAULTS = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "gradient_accumulation_steps": 1}


def changed(case: Failure, suggestion: dict[str, Any]) -> Failure | None:
    """The program with a suggestion; None for one that cannot be carried out here."""
    name, how = suggestion["name"], suggestion["how"]
    if name == "alloc-conf":
        key, _, value = how[0].removeprefix("export ").partition("=")
        return replace(case, environment={key: value})
    if case.data is None:
        return replace(case, flags=("--change", name))
    options = dict(case.options)
    if name == "half-prompts" and options.get("steps_per_generation", 1) == 1:
        # as the comments in its lines say
        options["steps_per_generation"] = 1
        how = [line.removeprefix("# ") for line in how if "gradient_accumulation_steps=" in line]
    for line in how:
        if line.lstrip().startswith("#"):
            continue
        if "dtype=torch.bfloat16" in line:
            options["dtype"] = "bfloat16"
        for key, value in _ARGUMENT.findall(line):
            now = options.get(key, COMMON.get(key, _DEFAULTS.get(key)))
            if value.startswith("..."):
                options[key] = now // 2 if "//" in value else now * 2
            elif "torch." not in value:
                options[key] = yaml.safe_load(value.replace("True", "true").replace("False", "false"))
    return None if options == case.options else replace(case, options=options)


def launch(case: Failure, data: Path, *, limit_bytes: int = 0, simulated: bool, records: bool) -> dict[str, Any]:
    """How a program ended, and what `ligerprof run` says."""
    environment = {**os.environ, **case.environment}
    if simulated:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif limit_bytes:
        environment["MEMORY_LIMIT_BYTES"] = str(limit_bytes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = case.command(data, folder)
        if simulated or records:
            device = ["--device", "simulated", "--gpu", "h200"] if simulated else []
            device += ["--memory-limit", str(limit_bytes)] if simulated and limit_bytes else []
            run = [sys.executable, "-m", "ligerprof", "run", "--json", *device, "-o", f"{folder}/run", "--"]
            command = [*run, *command]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    peaks = [line for line in done.stderr.splitlines() if line.startswith("TORCH-PEAK ")]
    found = json.loads(done.stdout) if records and done.stdout.strip() else {}
    counters = json.loads(peaks[-1].removeprefix("TORCH-PEAK ")) if peaks else {}
    return {"exit": done.returncode, "counters": counters, "found": found, "tail": done.stderr[-800:]}


def provoke(case: Failure, data: Path, *, simulated: bool) -> dict[str, Any]:
    """Run three times; a failure of this script does not end the other programs."""
    started = time.monotonic()
    row: dict[str, Any] = {"failure": case.name, "percent": case.percent, "simulated": simulated}
    try:
        row = _provoke(case, data, row, simulated=simulated)
    except Exception as error:
        row["problem"] = f"{type(error).__name__}: {error}"[-800:]
    return row | {"seconds": round(time.monotonic() - started, 1)}


def _provoke(case: Failure, data: Path, row: dict[str, Any], *, simulated: bool) -> dict[str, Any]:
    whole = launch(case, data, simulated=simulated, records=False)
    if whole["exit"] or not whole["counters"]:
        return {**row, "problem": whole["tail"]}
    row["reserved_bytes"] = whole["counters"]["reserved_bytes"]
    row["limit_bytes"] = limit_bytes = row["reserved_bytes"] * case.percent // 100
    failed = launch(case, data, limit_bytes=limit_bytes, simulated=simulated, records=True)
    row["failed_exit"] = failed["exit"]
    (rank,) = failed["found"].get("ranks", [None])
    if rank is None or not rank["oom"]:
        return {**row, "problem": f"it did not run out of memory: {failed['tail']}"}
    row["oom"] = {key: rank["oom"].get(key) for key in ("phase", "step", "module", "missing_bytes")}
    row["roles"] = {role: size for role, size in rank["roles"].items() if size}
    names = ("name", "saves_bytes", "lets_pass", "how")
    row["suggestions"] = [{key: each[key] for key in names} for each in rank["suggestions"]]
    again = changed(case, rank["suggestions"][0]) if rank["suggestions"] else None
    if again is None:
        return {**row, "runs": False, "problem": "no suggestion that can be carried out"}
    mended = launch(again, data, limit_bytes=limit_bytes, simulated=simulated, records=False)
    row["runs"] = mended["exit"] == 0
    if not row["runs"]:
        row["problem"] = mended["tail"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--device", choices=("cuda", "simulated"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in FAILURES])
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time")
    args = parser.parse_args()
    import torch

    simulated = args.device == "simulated"
    gpu = "simulated NVIDIA H200" if simulated else torch.cuda.get_device_name(0)
    made = {"date": time.strftime("%Y-%m-%d"), "gpu": gpu, "torch": torch.__version__}
    cases = [case for case in FAILURES if not args.only or case.name in args.only]
    ran = 0
    with args.results.open("a") as out, ThreadPoolExecutor(args.jobs) as pool:
        for done in as_completed(
            [pool.submit(provoke, case, args.data.resolve(), simulated=simulated) for case in cases]
        ):
            row = done.result()
            out.write(json.dumps(made | row) + "\n")
            out.flush()
            ran += bool(row.get("runs"))
            first = next(iter(row.get("suggestions", ())), {})
            said = {key: row.get(key) for key in ("failure", "runs", "seconds", "oom")}
            print({**said, "first": first.get("name"), "problem": (row.get("problem") or "")[-300:]}, flush=True)
    print(f"{ran} of {len(cases)} run with the first suggestion")


if __name__ == "__main__":
    main()
