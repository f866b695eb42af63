"""Measure ZeRO on several GPUs rank by rank, compare with the estimate, and make small recordings for tests.

    python benchmarks/zero.py measure benchmarks/results/zero-h200.jsonl
    python benchmarks/zero.py measure build/zero.jsonl --gpus 2 --rows again,stage-0 --keep build/recordings
    python benchmarks/zero.py record build/recordings
    python benchmarks/zero.py table benchmarks/results/zero-h200.jsonl > docs/results/zero-h200.md

`measure` and `record` require four GPUs (or `--gpus 1`, to try them); `--gpus 2` measures other models under each
stage, or the groups of `--rows`, one row after another within a group. `table` requires none. Rows run concurrently,
which affects their time but not their memory, so rows do not contain times.
"""

import argparse
import itertools
import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Options = tuple[str, ...]
KEPT = ("recipe", "gpu", "peak_bytes", "peak_phase", "reserved_bytes", "first_step_peak_bytes", "phases", "roles")
KEPT_TOO = ("host_bytes", "ranks", "oom", "notes", "versions", "finished")
KERNELS = ("none", "all")
PLAIN = tuple(("--zero", stage) for stage in ("1", "2", "3"))
OFFLOADED = (("--zero", "2", "--offload", "optimizer"), ("--zero", "3", "--offload", "all"))
ROW: Options = ("--engine", "deepspeed", "--precision", "mixed", "--batch", "2", "--repeats", "1", "--no-trace")
OTHERS: tuple[Options, ...] = (
    ("--model", "qwen3-0.6b", "--batch", "4", "--no-checkpointing"),
    ("--model", "tinyllama-1.1b", "--seq", "2048", "--liger", "all"),
)
# on two GPUs, by `--rows`
GROUPS: dict[str, tuple[Options, ...]] = {
    **{f"others-{zero[1]}": tuple((*zero, *other) for other in OTHERS) for zero in PLAIN},
    # measured twice, since simulated reserved bytes differ
    "again": (("--zero", "3", "--liger", "all"), ("--zero", "3", *OTHERS[1])),
    "stage-0": (("--zero", "0", *OTHERS[0]), ("--zero", "0", "--liger", "all")),
    "lora": (("--zero", "2", "--lora", "16"), ("--zero", "3", "--lora", "16", "--liger", "all")),
    "offload-few": (
        ("--zero", "1", "--offload", "optimizer", *OTHERS[1]),
        ("--zero", "2", "--offload", "optimizer", "--grad-accum", "2"),
    ),
    "offload-more": (
        ("--zero", "3", "--offload", "optimizer", *OTHERS[0]),
        ("--zero", "3", "--offload", "all", *OTHERS[1]),
    ),
}
# the options behind replace those of ROW
DDP: Options = ("--engine", "ddp", "--precision", "amp")
FSDP2: Options = ("--engine", "fsdp2")
EVALUATED: Options = ("--eval-batch", "8")
GROUPS |= {
    "evaluated": tuple(
        (*options, *EVALUATED)
        for options in (
            DDP,
            (*DDP, *OTHERS[0], "--precision", "bf16-amp", "--liger", "all"),
            FSDP2,
            (*FSDP2, *OTHERS[0], "--wrap", "accelerate", "--no-reshard"),
        )
    ),
    "evaluated-zero": tuple(
        (*options, *EVALUATED)
        for options in (
            ("--zero", "2"),
            ("--zero", "3"),
            ("--zero", "3", *OTHERS[0]),
            ("--zero", "3", *OTHERS[1]),
        )
    ),
}
# a Llama of 29 million parameters: what it records is small enough to keep
SMALL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


def step(options: Options, folder: Path, visible: str) -> dict[str, Any]:
    """Run one step in a separate process on some of the GPUs."""
    finished = subprocess.run(
        [sys.executable, "-m", "ligerprof", "step", "--json", "-o", str(folder), *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
    )
    if finished.returncode not in (0, 3):
        logs = "".join(f"\n{log}: {log.read_text()[-1500:]}" for log in folder.glob("rank-*.log"))
        raise RuntimeError(f"{' '.join(options)}: {finished.stderr[-1500:]}{logs}")
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


def lanes(gpus: int, groups: Sequence[str]) -> list[tuple[str, list[Options]]]:
    """Rows that run one after the other, by the GPUs they run on."""
    if gpus == 1:
        return [("0", [("--gpus", "1", *zero) for zero in (*PLAIN, *OFFLOADED)])]
    if gpus == 2:
        return [("0,1", [("--gpus", "2", *row) for row in GROUPS[group]]) for group in groups]
    pairs = [(*zero, "--liger", kernels) for zero, kernels in itertools.product((*PLAIN, *OFFLOADED), KERNELS)]
    fours = [(*zero, "--liger", kernels) for zero, kernels in itertools.product((*PLAIN, OFFLOADED[1]), KERNELS)]
    return [
        ("0,1", [("--gpus", "2", *row) for row in pairs[::2]]),
        ("2,3", [("--gpus", "2", *row) for row in pairs[1::2]]),
        ("0,1,2,3", [("--gpus", "4", *row) for row in fours[::2]]),
        ("0,1,2,3", [("--gpus", "4", *row) for row in fours[1::2]]),
    ]


def run_lane(visible: str, rows: Sequence[Options], results: Path, keep: Path | None) -> None:
    for options in rows:
        started = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                row = step((*ROW, *options), Path(folder) / "run", visible)
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    name = "-".join(option.strip("-") for option in options)
                    pack(Path(folder) / "run" / "snapshot.pickle", keep / f"{name}.pickle.xz", preset=3)
        except (RuntimeError, ValueError) as error:
            print(f"FAILED {' '.join(options)}: {error}", file=sys.stderr, flush=True)
            continue
        line = json.dumps({key: row[key] for key in (*KEPT, *KEPT_TOO)}) + "\n"
        with results.open("a") as lines:
            lines.write(line)
        seconds = time.monotonic() - started
        print(f"{' '.join(options)}: {row['peak_bytes']} bytes, {seconds:.0f} s", file=sys.stderr, flush=True)


def measure(results: Path, arguments: argparse.Namespace) -> None:
    plan = lanes(arguments.gpus, arguments.rows)
    with ThreadPoolExecutor(len(plan)) as pool:
        for done in [pool.submit(run_lane, visible, rows, results, arguments.keep) for visible, rows in plan]:
            done.result()


def record(folder: Path, gpus: int) -> None:
    """Record ZeRO-2, ZeRO-3 and one process on two GPUs, with the peaks of torch's counters in peaks.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps(SMALL))
    visible = ",".join(str(index) for index in range(min(gpus, 2)))
    peaks: dict[str, Any] = {}
    for stage in ("2", "3"):
        options = (*ROW, "--gpus", str(min(gpus, 2)), "--zero", stage, "--model", str(config), "--seq", "512")
        result = step(options, folder / f"zero{stage}", visible)
        kept = ("peak_bytes", "reserved_bytes", "first_step_peak_bytes", "phases", "roles", "ranks", "notes")
        peaks[f"small-zero{stage}"] = {key: result[key] for key in kept}
        pack(folder / f"zero{stage}" / "snapshot.pickle", folder / f"small-zero{stage}.pickle.xz")
    peaks["small-two-devices"] = record_devices(config, folder, min(gpus, 2))
    (folder / "peaks.json").write_text(json.dumps(peaks, indent=2))


def pack(source: Path, target: Path, preset: int = 9 | lzma.PRESET_EXTREME) -> None:
    target.write_bytes(lzma.compress(source.read_bytes(), preset=preset))


def record_devices(config: Path, folder: Path, devices: int) -> list[dict[str, int]]:
    """Train one model per GPU in one process under torch's recorder: batch 1 on the first GPU, 2 on the second."""
    import torch

    from ligerprof.recipe.training import TrainingRecipe
    from ligerprof.runs.training import make_batch, torch_trainer, train_step

    memory: Any = torch.cuda.memory
    memory._record_memory_history(max_entries=200_000, stacks="python")
    recipes = [
        TrainingRecipe(model=str(config), precision="bf16", batch=index + 1, seq=256) for index in range(devices)
    ]
    for index, recipe in enumerate(recipes):
        device = torch.device("cuda", index)
        with torch.cuda.device(device), torch_trainer(recipe, device, lambda _model: None) as trainer:
            for _ in range(2):
                train_step(trainer, make_batch(recipe, device), Unwatched())
            torch.cuda.synchronize()
    memory._dump_snapshot(str(folder / "two-devices.pickle"))
    pack(folder / "two-devices.pickle", folder / "small-two-devices.pickle.xz")
    return [
        {
            "device": index,
            "peak_bytes": torch.cuda.max_memory_allocated(index),
            "reserved_bytes": torch.cuda.max_memory_reserved(index),
        }
        for index in range(devices)
    ]


class Unwatched:
    """An observer that records nothing."""

    def phase(self, _phase: Any) -> Any:
        from contextlib import nullcontext

        return nullcontext()

    def loss_made(self, _loss: Any) -> None:
        pass


def table_rows(results: Path) -> Iterator[str]:
    from ligerprof.analyzers.estimate import estimate
    from ligerprof.recipe.training import TrainingRecipe

    rows = [json.loads(line) for line in results.read_text().splitlines()]
    order = ("model", "gpus", "zero", "offload", "liger")
    rows.sort(key=lambda row: [row["recipe"][key] for key in order])
    yield (
        "| model | tokens | GPUs | ZeRO | offload | kernels | peak per rank, MiB | forward | backward | optimizer |"
        " estimated | error |"
        " first step | estimated | error |"
    )
    yield "|---|---|---:|---:|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        recipe = row["recipe"]
        estimated = estimate(TrainingRecipe.from_json(recipe))
        first, first_estimated = row["first_step_peak_bytes"], estimated.first_step_peak_bytes
        tokens = f"{recipe['batch']} x {recipe['seq']}"
        tokens += f", {recipe['grad_accum']} times" if recipe["grad_accum"] > 1 else ""
        tokens += f", LoRA {recipe['lora']}" if recipe["lora"] else ""
        cells = [
            recipe["model"],
            tokens,
            str(recipe["gpus"]),
            str(recipe["zero"]),
            recipe["offload"],
            "+".join(recipe["kernels"]) or "none",
        ]
        cells.append(", ".join(f"{rank['peak_bytes'] / 2**20:,.1f}" for rank in row["ranks"] or [row]))
        cells += [f"{row['phases'][phase] / 2**20:,.1f}" for phase in ("forward", "backward", "optimizer")]
        cells += [
            f"{estimated.peak_bytes / 2**20:,.1f}",
            f"{100 * (estimated.peak_bytes / row['peak_bytes'] - 1):+.2f} %",
        ]
        cells += [
            f"{first / 2**20:,.1f}",
            f"{first_estimated / 2**20:,.1f}",
            f"{100 * (first_estimated / first - 1):+.2f} %",
        ]
        yield f"| {' | '.join(cells)} |"


def table(results: Path) -> None:
    first = json.loads(results.read_text().splitlines()[0])
    versions, recipe = first["versions"], first["recipe"]
    print("# ZeRO on several GPUs\n")
    print(
        f"Tokens per GPU, {recipe['precision']}, checkpointing but for Qwen, on {first['gpu']}s of one machine"
        f" (torch {versions['torch']}, deepspeed {versions['deepspeed']}). Peaks are"
        " `max_memory_allocated` of the steady step, rank 0 first. Phases, errors and the first step are those of the"
        " rank with the highest peak.\n"
    )
    for row in table_rows(results):
        print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "record", "table"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--gpus", type=int, default=4, choices=(1, 2, 4))
    parser.add_argument(
        "--rows", type=lambda text: text.split(","), default=list(GROUPS)[:3], help=f"with 2 GPUs: {','.join(GROUPS)}"
    )
    parser.add_argument("--keep", type=Path, help="keep the recording of each row in this folder, too")
    arguments = parser.parse_args()
    if arguments.what == "table":
        table(arguments.path)
    elif arguments.what == "measure":
        measure(arguments.path, arguments)
    else:
        record(arguments.path, arguments.gpus)


if __name__ == "__main__":
    main()
