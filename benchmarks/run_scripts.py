"""Run the scripts in run_scripts/ under `ligerprof run`: their peaks against torch's counter, phases, and failures.

The scripts do not know ligerprof. Those that print `PEAK` give torch.cuda.max_memory_allocated() at their end. For
failures, limited.py and others run with less memory than they reserve, and then again with the flag of the first
suggestion. script_overhead.py measures what recording costs the scripts.

    python benchmarks/run_scripts.py results/ --only plain,image --failures 3
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPTS = HERE / "run_scripts"
LAUNCHERS = {
    "accelerated": ["-m", "accelerate.commands.launch", "--num_processes", "1"],
    "deepspeed_zero3": ["-m", "deepspeed.launcher.runner", "--num_gpus", "1"],
    "batch_finder": ["-m", "accelerate.commands.launch", "--num_processes", "1"],
    "deepspeed_zero2": ["-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", "29541"],
    "two_ranks": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29542"],
    "full_shard": ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-port", "29533"],
}
NOT_ALONE = "limited"
# arguments of limited.py, or another of these scripts and its arguments; how many percent of what it reserves it gets
FAILURES = (
    ("--batch 8 --seq 1024", 80),
    ("--model gpt2 --vocabulary 50257 --batch 8", 80),
    ("--layers 16 --vocabulary 2000 --batch 8", 75),
    ("--layers 12 --vocabulary 2000 --batch 8 --seq 1024 --autocast", 75),
    ("--model gpt2 --attention eager --seq 1024 --vocabulary 4000 --batch 8 --layers 8", 80),
    ("--model mlp --batch 16", 75),
    ("--model mlp --batch 1 --late-zero", 92),
    ("--model vit --layers 12 --batch 64", 80),
    ("--vocabulary 2000 --eval-batch 64", 80),
    ("--vocabulary 64000 --batch 4 --checkpointing", 85),
    ("--model mlp --batch 4 --keep-losses", 70),
    ("--vocabulary 32000 --batch 6 --keep-outputs --checkpointing", 85),
    ("limited_trainer --batch 8 --seq 1024 --autocast", 80),
    ("limited_trainer --layers 16 --vocabulary 2000 --batch 8", 75),
    ("limited_trainer --model gpt2 --vocabulary 4000 --batch 4 --eval-batch 64", 62),
    ("limited_images --batch 96", 62),
    ("limited_images --batch 32 --eval-batch 512", 62),
    ("--attention eager --vocabulary 2000 --batch 2 --seq 2048 --autocast", 75),
)


def changed(arguments: list[str], name: str, how: list[str]) -> list[str] | None:
    """The arguments of limited.py with a suggestion carried out; None for one that it has no flag for.

    Args:
        how: the lines of the suggestion; another change's line that they contain is carried out, too.
    """

    def times(flag: str, factor: float, default: int) -> list[str]:
        now = int(arguments[arguments.index(flag) + 1]) if flag in arguments else default
        return [flag, str(int(now * factor))]

    # of two equal flags, the last counts
    flags = {
        "fused-loss": ["--fused-loss"],
        "fused-optimizer": ["--fused-optimizer"],
        "sdpa": ["--attention", "sdpa"],
        "checkpointing": ["--checkpointing"],
        "half-batch": [*times("--batch", 0.5, 4), *times("--accumulation", 2, 1)],
        "eval-batch": times("--eval-batch", 0.5, 0),
    }
    removed = {"zero-grad": "--late-zero", "kept-outputs": "--keep-losses", "del-outputs": "--keep-outputs"}
    if name not in removed and name not in flags:
        return None
    dropped = [removed.get(name)] + ["--late-zero"] * any("zero_grad" in line for line in how)
    return [*(argument for argument in arguments if argument not in dropped), *flags.get(name, [])]


def failure(case: tuple[str, int], folder: Path) -> dict[str, Any]:
    """Run out of memory, and run again with the first suggestion."""
    name, *arguments = case[0].split() if case[0].startswith(NOT_ALONE) else (NOT_ALONE, *case[0].split())
    script = SCRIPTS / f"{name}.py"
    reserved = [int(line.split()[1]) for line in launch(script, arguments)["lines"] if line.startswith("RESERVED")]
    limit = ["--limit-bytes", str(reserved[0] * case[1] // 100)]
    run = folder / f"failure-{FAILURES.index(case)}"
    got = launch(script, [*arguments, *limit], options=["-o", str(run)])
    shutil.rmtree(run, ignore_errors=True)
    rank = got["result"]["ranks"][0]
    found: dict[str, Any] = {
        "arguments": case[0],
        "share": case[1],
        "exit_code": got["exit_code"],
        "oom": rank["oom"] and {key: rank["oom"].get(key) for key in ("phase", "step", "module", "missing_bytes")},
        "roles": {role: size for role, size in rank["roles"].items() if size},
        "suggestions": [
            [suggestion[key] for key in ("name", "saves_bytes", "lets_pass", "how")]
            for suggestion in rank["suggestions"]
        ],
    }
    if not rank["oom"]:
        found["tail"] = got["tail"]
    for place, suggestion in enumerate(rank["suggestions"][:2]):
        again = changed(arguments, name := suggestion["name"], suggestion["how"])
        done = None if again is None else launch(script, [*again, *limit])
        found["first" if place == 0 else "second"] = {"name": name, "runs": done and done["exit_code"] == 0}
        if done and done["exit_code"]:
            found["tail"] = done["tail"][-500:]
    return found


def launch(
    script: Path,
    arguments: list[str] | None = None,
    *,
    options: list[str] | None = None,
) -> dict[str, Any]:
    """Run a script, under `ligerprof run` if there are options; what it printed and how it ended."""
    command = [sys.executable, *LAUNCHERS.get(script.stem, []), str(script), *(arguments or [])]
    if options is not None:
        command = [sys.executable, "-m", "ligerprof", "run", "--json", *options, "--", *command]
    begin = time.perf_counter()
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=500,
    )
    # with --json, the script's own output is on stderr
    printed = (done.stdout if options is None else "") + done.stderr
    words = [line.split() for line in printed.splitlines()]
    return {
        "exit_code": done.returncode,
        "seconds": round(time.perf_counter() - begin, 2),
        "result": json.loads(done.stdout) if options is not None and done.stdout.strip() else None,
        "peaks": [int(line[1]) for line in words if line[:1] == ["PEAK"] and len(line) == 2],
        "said": [line for line in printed.splitlines() if line.startswith(("FAILURES", "GRAPHS", "ligerprof:"))],
        "lines": printed.splitlines(),
        "tail": printed[-1500:],
    }


def check(script: Path, folder: Path, steps: str = ":") -> dict[str, Any]:
    """Record a script, and compare its peaks."""
    run = folder / f"{script.stem}-{steps.replace(':', '-')}"
    got = launch(script, options=["-o", str(run), "--steps", steps])
    ranks = got["result"]["ranks"] if got["result"] else []
    found = {
        "script": script.stem,
        "recorded": steps,
        "exit_code": got["exit_code"],
        "seconds": got["seconds"],
        "torch_peaks": sorted(got["peaks"]),
        "ranks": [
            {
                **{key: rank[key] for key in ("rank", "peak_bytes", "complete", "phase", "step", "steps", "phases")},
                "roles": {role: size for role, size in rank["roles"].items() if size},
                "oom": rank["oom"] and {key: rank["oom"].get(key) for key in ("phase", "step", "module", "caught")},
                "suggestions": [
                    [suggestion[key] for key in ("name", "saves_bytes", "how")] for suggestion in rank["suggestions"]
                ][:4],
            }
            for rank in ranks
        ],
        "notes": got["result"]["notes"] if got["result"] else None,
        "said": got["said"],
    }
    found["equal"] = found["torch_peaks"] == sorted(rank["peak_bytes"] for rank in found["ranks"])
    if not found["equal"] or got["exit_code"]:
        found["tail"] = got["tail"]
    shown = subprocess.run(
        [sys.executable, "-m", "ligerprof", "explain", "--by", "phase", str(run)],
        check=False,
        capture_output=True,
        text=True,
    )
    found["explained"] = (shown.stdout + shown.stderr)[:2500]
    shutil.rmtree(run, ignore_errors=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", help="names of scripts, joined by commas; default: all")
    parser.add_argument("--steps", help="record these steps, such as 5:6, instead of all")
    parser.add_argument("--failures", type=int, default=0, help="number of failures to provoke")
    parser.add_argument("--skip", type=int, default=0, help="the first failures")
    parser.add_argument("--jobs", type=int, default=1, help="scripts at a time")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
    every = sorted(path.stem for path in SCRIPTS.glob("*.py") if not path.stem.startswith(NOT_ALONE))
    names = every if arguments.only is None else list(filter(None, arguments.only.split(",")))
    results: dict[str, list[Any]] = {"scripts": [], "failures": []}
    scratch = arguments.output / "scratch"
    scratch.mkdir(exist_ok=True)

    def keep(kind: str, function: Any, chosen: Any) -> None:
        try:
            found = function(chosen)
        except Exception as error:  # one script must not end the others
            found = {"script": str(chosen), "error": f"{type(error).__name__}: {error}"[-1500:]}
        results[kind].append(found)
        print(json.dumps(found)[:1500], flush=True)
        (arguments.output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for name in names:
            pool.submit(
                keep, "scripts", lambda script: check(script, scratch, arguments.steps or ":"), SCRIPTS / f"{name}.py"
            )
        for steps in ("2:3", "5:6") if "plain" in names and not arguments.steps else ():
            pool.submit(keep, "scripts", lambda steps: check(SCRIPTS / "plain.py", scratch, steps), steps)
        for case in FAILURES[arguments.skip : arguments.skip + arguments.failures]:
            pool.submit(keep, "failures", lambda case: failure(case, scratch), case)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
