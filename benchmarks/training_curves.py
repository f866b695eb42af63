"""Train a small Llama for 200 steps on this repository's own text, with and without our kernels, and compare losses.

    python benchmarks/training_curves.py measure benchmarks/results/training-curves-h200.json
    python benchmarks/training_curves.py figure benchmarks/results/training-curves-h200.json docs/results/curves.svg

Each byte is a token; the text consists of the pages of docs, the README and the license. Curves of one seed start from
the same weights and train on the same batches. `torch` is the plain-torch references of our kernels: the same formulas,
rounded in another order, which shows the difference that rounding alone causes. `measure` requires a GPU.
"""

import argparse
import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STEPS, BATCH, TOKENS = 200, 16, 512
LEARNING_RATE, WARM_UP_STEPS = 1e-3, 20
CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": TOKENS,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
# largest distance of our losses from eager's at the same step, over all seeds; the losses fall from 5.6. Training
# carries every rounding on: in fp32 plain torch that rounds in another order ends 0.023 away, and in bf16 the yardstick
# is how far eager itself is from eager in fp32
FP32_BOUND = 0.05
BF16_BOUND = "eager's own distance from fp32"
SEEDS = (0, 1, 2)
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
PROVIDERS = {"eager": None, "torch": "torch", "ligerprof": "ligerprof"}


def read_text() -> bytes:
    pages = [ROOT / "README.md", ROOT / "LICENSE", *sorted((ROOT / "docs").rglob("*.md"))]
    return b"\n".join(page.read_bytes() for page in pages)


def batches(text: bytes, seed: int) -> Iterator[Any]:
    """Random windows of the text, the same ones every time."""
    import torch

    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        starts = torch.randint(0, len(data) - TOKENS, (BATCH,), generator=generator)
        yield torch.stack([data[start : start + TOKENS] for start in starts]).cuda()


def train(precision: str, provider: str | None, seed: int, text: bytes) -> list[float]:
    """The loss of every step."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ligerprof.kernels import apply

    torch.manual_seed(seed)
    config = AutoConfig.for_model("llama", **CONFIG)
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).cuda()
    model = model.to(getattr(torch, DTYPES[precision])).train()
    if provider is not None:
        apply(model, "all", provider=provider)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
    losses = []
    for ids in batches(text, seed):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in torch.stack(losses).float().cpu()]


def distance(some: list[list[float]], others: list[list[float]]) -> float:
    """The largest at any step of any seed."""
    return max(
        abs(left - right)
        for one, other in zip(some, others, strict=True)
        for left, right in zip(one, other, strict=True)
    )


def final_loss(curves: list[list[float]]) -> float:
    """Mean of the last twenty steps of every seed."""
    return sum(sum(curve[-20:]) / 20 for curve in curves) / len(curves)


def measure(results: Path) -> None:
    import torch

    from ligerprof.runs.outcome import package_versions

    text = read_text()
    curves = {
        precision: {
            name: [train(precision, provider, seed, text) for seed in SEEDS] for name, provider in PROVIDERS.items()
        }
        for precision in DTYPES
    }
    result = {
        "schema": 1,
        "kind": "training_curves",
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": dict(package_versions()),
        "config": CONFIG,
        "text_bytes": len(text),
        "batch": BATCH,
        "tokens": TOKENS,
        "seeds": SEEDS,
        "curves": curves,
    }
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(result) + "\n")


def verdicts(result: dict[str, Any]) -> Iterator[str]:
    """A line for each precision and provider: how far from eager, and where the losses end."""
    curves = result["curves"]
    eager_from_fp32 = distance(curves["bf16"]["eager"], curves["fp32"]["eager"])
    bounds = {"fp32": (FP32_BOUND, "about twice what rounding does"), "bf16": (eager_from_fp32, BF16_BOUND)}
    for precision, (bound, what) in bounds.items():
        for name, own in curves[precision].items():
            far = distance(own, curves[precision]["eager"])
            verdict = "within" if far <= bound else "BEYOND"
            yield (
                f"{precision} {name:9s}: from eager at most {far:.4f}, {verdict} {bound:.4f} ({what});"
                f" mean of the last 20 losses {final_loss(own):.4f}"
            )


def draw(result: dict[str, Any], figure_file: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(2, 1))
    for precision, color in (("fp32", "tab:blue"), ("bf16", "tab:orange")):
        eager, ours = (result["curves"][precision][name][0] for name in ("eager", "ligerprof"))
        top.plot(eager, color=color, label=f"{precision}, eager")
        top.plot(ours, color="black", linestyle=":", linewidth=1, label=f"{precision}, our kernels")
        bottom.plot([abs(left - right) for left, right in zip(eager, ours, strict=True)], color=color, label=precision)
    top.set_ylabel("loss a byte, nats")
    top.legend()
    bottom.set_yscale("log")
    bottom.set_ylabel("distance")
    bottom.set_xlabel("step")
    top.set_title(f"Small Llama on this repository's text, {result['gpu']}, torch {result['versions']['torch']}")
    figure.tight_layout()
    figure.savefig(figure_file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "figure"))
    parser.add_argument("results", type=Path)
    parser.add_argument("figure", type=Path, nargs="?")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments.results)
    result = json.loads(arguments.results.read_text())
    if arguments.figure is not None:
        draw(result, arguments.figure)
    for line in verdicts(result):
        print(line)


if __name__ == "__main__":
    main()
