"""Measure training steps drawn at random over the recipe space, then score simulation and estimate against them.

    python benchmarks/accuracy.py measure --seed 1 --count 100 benchmarks/results/accuracy-h200.jsonl
    python benchmarks/accuracy.py again benchmarks/results/accuracy-h200.jsonl
    python benchmarks/accuracy.py score benchmarks/results/accuracy-h200.jsonl

`measure` requires a GPU and keeps every draw: a step that fails or runs out of memory also has a row.
`again` repeats, in place, the rows with ligerprof's kernels after a kernel has changed.
`score` does not require a GPU: it adds the simulated and the estimated figures to each row and prints a table.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import LigerprofError
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from ligerprof.units import GIB

RESULTS = Path(__file__).with_name("results") / "accuracy-h200.jsonl"
ZERO_RESULTS = RESULTS.with_name("zero-h200.jsonl")
AT_ONCE = 5
OWN = "our kernels"
SHARED_BYTES = 110 * GIB
LARGEST_BYTES = 50 * GIB


def draw_model(source: random.Random) -> str | dict[str, Any]:
    """A built-in model, or a Llama of random sizes."""
    if source.random() < 0.5:
        return source.choice(("llama3.2-1b", "llama3.2-1b", "llama3.2-3b", "gpt2-xl", "tiny"))
    kv_heads = source.choice((1, 2, 4, 8))
    heads = kv_heads * source.choice((1, 2, 3, 4))
    head_dim = source.choice((64, 64, 96, 128))
    return {
        "model_type": source.choice(("llama", "mistral", "qwen2", "qwen3")),
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": source.randrange(8, 96) * 64 + source.choice((0, 0, 8)),
        "num_hidden_layers": source.randint(2, 9),
        "vocab_size": source.choice((32000, 50304, 128256, 151936, source.randrange(1000, 90000))),
        "tie_word_embeddings": source.random() < 0.5,
        "max_position_embeddings": 32768,
    }


def draw(source: random.Random) -> dict[str, Any]:
    """One recipe's options; memory alone decides whether it is drawn again."""
    precision = source.choice(("bf16", "bf16", "amp", "amp", "fp16", "amp-fp16", "fp32"))
    checkpointing = source.random() < 0.6
    options: dict[str, Any] = {
        "model": draw_model(source),
        "batch": source.choice((1, 2, 3, 4, 6, 8)),
        "seq": source.choice((128, 512, 777, 1000, 1024, 2048, 4096)),
        "precision": precision,
        "checkpointing": checkpointing,
        "reentrant": checkpointing and source.random() < 0.15,
        "optimizer": source.choice(("adamw-fused", "adamw-fused", "adamw-foreach", "sgd", "none")),
        "attention": source.choice(("sdpa", "sdpa", "sdpa", "eager")),
        "grad_accum": source.choice((1, 1, 1, 2, 3)),
        "clip": source.choice((None, None, 1.0)),
        "padding": source.choice((0.0, 0.0, 0.0, 0.25)),
    }
    kind = source.random()
    if kind < 0.2:
        options["liger"] = source.choice(("all", "no-flce", "flce", "ce"))
    elif kind < 0.3:
        options["lora"] = source.choice((4, 16, 64))
    elif kind < 0.35:
        options["loss"] = "hf-4.45"
    return options


def draws(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """The first `count` draws that are recipes and are estimated to take less than 50 GiB."""
    source = random.Random(seed)
    while count:
        options = draw(source)
        try:
            peak_bytes = estimate(recipe_of(options)).peak_bytes
        except LigerprofError:
            continue
        if peak_bytes < LARGEST_BYTES:
            count -= 1
            yield options


def recipe_of(options: dict[str, Any]) -> TrainingRecipe:
    values = dict(options)
    if isinstance(values["model"], dict):
        values["model_config"] = values.pop("model")
        values["model"] = "drawn"
    return TrainingRecipe.from_json(values)


class Budget:
    """Lets as many steps run at once as the GPU's memory holds."""

    def __init__(self, size_bytes: int) -> None:
        self._left_bytes = size_bytes
        self._changed = threading.Condition()

    def take(self, size_bytes: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left_bytes >= size_bytes)
            self._left_bytes -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        with self._changed:
            self._left_bytes += size_bytes
            self._changed.notify_all()


def measure_one(number: int, options: dict[str, Any], budget: Budget) -> dict[str, Any]:
    recipe = recipe_of(options)
    # what the allocator keeps and the CUDA context come on top
    size_bytes = int(1.4 * estimate(recipe).peak_bytes) + 2 * GIB
    budget.take(size_bytes)
    try:
        return {"number": number, "options": options, **run_step(options)}
    finally:
        budget.give_back(size_bytes)


def run_step(options: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = options["model"]
        if isinstance(model, dict):
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(model))
            model = str(path)
        command = [sys.executable, "-m", "ligerprof", "step", "--repeats", "1", "--json"]
        command += ["-o", f"{folder}/run", "--model", model, *flags({"device": "cuda", **options})]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode not in (0, 3):
            return {"failed": finished.stderr.strip().splitlines()[-1]}
        result = json.loads(finished.stdout)
    kept = (
        "gpu",
        "peak_bytes",
        "reserved_bytes",
        "first_step_peak_bytes",
        "first_step_reserved_bytes",
        "phases",
        "host_bytes",
        "oom",
    )
    return {key: result[key] for key in (*kept, "versions", "finished", "notes")}


def flags(options: dict[str, Any]) -> Iterator[str]:
    """The command-line words of all options but the model."""
    for name, value in options.items():
        if name != "model" and value is not None:
            yield from filter(None, RECIPE_OPTIONS[name].typed(value))


def measure(results: Path, seed: int, count: int) -> None:
    budget, lock = Budget(SHARED_BYTES), threading.Lock()

    def run(numbered: tuple[int, dict[str, Any]]) -> None:
        row = {"seed": seed, **measure_one(*numbered, budget)}
        with lock, results.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print(numbered[0], row.get("peak_bytes"), row.get("failed", ""), file=sys.stderr, flush=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(run, enumerate(draws(seed, count))))


def measure_again(results: Path) -> None:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    budget = Budget(SHARED_BYTES)

    def run(row: dict[str, Any]) -> dict[str, Any]:
        if group_of(row["options"]) != OWN:
            return row
        row = {"seed": row["seed"], **measure_one(row["number"], row["options"], budget)}
        print(row["number"], row.get("peak_bytes"), row.get("failed", ""), file=sys.stderr, flush=True)
        return row

    with ThreadPoolExecutor(AT_ONCE) as pool:
        measured = list(pool.map(run, rows))
    results.write_text("".join(json.dumps(row) + "\n" for row in measured))


def load_rows(results: Path) -> list[dict[str, Any]]:
    """Rows that ran to their end."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return [row for row in rows if "failed" not in row and not row.get("oom")]


def group_of(options: dict[str, Any]) -> str:
    if options.get("liger", "none") != "none":
        return OWN
    if "lora" in options:
        return "LoRA"
    return "hf-4.45" if options.get("loss") == "hf-4.45" else "plain"


def score(results: Path) -> None:
    from ligerprof.runs.simulated import simulate_step

    rows = [json.loads(line) for line in results.read_text().splitlines()]
    for row in sorted(rows, key=lambda row: (row["seed"], row["number"])):
        if "failed" in row or row["oom"]:
            print("failed" if "failed" in row else "oom", row["options"], row.get("failed"))
            continue
        recipe = recipe_of(row["options"])
        simulated = simulate_step(recipe, record=False)
        row["simulated_peak_bytes"], row["simulated_reserved_bytes"] = simulated.peak_bytes, simulated.reserved_bytes
        row["estimated_peak_bytes"] = estimate(recipe).peak_bytes
        figures = [row[f"{kind}_peak_bytes"] / row["peak_bytes"] - 1 for kind in ("simulated", "estimated")]
        figures.append(row["simulated_reserved_bytes"] / row["reserved_bytes"] - 1)
        print(f"{figures[0]:+.4%} {figures[1]:+.4%} reserved {figures[2]:+.2%} {row['options']}", flush=True)
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summarize(rows)


def summarize(rows: list[dict[str, Any]]) -> None:
    print("\n| steps | simulated peak, median | worst | simulated reserved, median | estimated, median | worst |")
    print("|---|---:|---:|---:|---:|---:|")
    for group in ("plain", OWN, "LoRA", "hf-4.45"):
        scored = [row for row in rows if "simulated_peak_bytes" in row and group_of(row["options"]) == group]
        if not scored:
            continue
        simulated = errors(scored, "simulated_peak_bytes", "peak_bytes")
        reserved = errors(scored, "simulated_reserved_bytes", "reserved_bytes")
        estimated = errors(scored, "estimated_peak_bytes", "peak_bytes")
        cells = (
            f"{len(scored)} {group}",
            f"{statistics.median(simulated):.4%}",
            f"{max(simulated):.3%}",
            f"{statistics.median(reserved):.2%}",
            f"{statistics.median(estimated):.4%}",
            f"{max(estimated):.2%}",
        )
        print(f"| {' | '.join(cells)} |")


def errors(rows: list[dict[str, Any]], figure: str, truth: str) -> list[float]:
    return [abs(row[figure] / row[truth] - 1) for row in rows]


def measure_or_score(recipes: Sequence[dict[str, Any]], *, at_once: int, description: str | None) -> None:
    """The command line of a script whose recipes are chosen, not drawn: run them on a GPU, or score what that wrote."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "score"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--match", default="", help="Measure only recipes with this text among their options.")
    arguments = parser.parse_args()
    if arguments.action == "score":
        score(arguments.results)
        return

    lock = threading.Lock()

    def run(numbered: tuple[int, dict[str, Any]]) -> None:
        number, options = numbered
        row = {"seed": 0, "number": number, "options": options, **run_step(options)}
        with lock, arguments.results.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print(options, row.get("peak_bytes"), row.get("failed", ""), file=sys.stderr, flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, ((at, recipe) for at, recipe in enumerate(recipes) if arguments.match in str(recipe))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "again", "score"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments.results, arguments.seed, arguments.count)
    elif arguments.what == "again":
        measure_again(arguments.results)
    else:
        score(arguments.results)


if __name__ == "__main__":
    main()
