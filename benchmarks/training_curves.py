"""Train a small Llama for 200 steps on this repository's own text, with and without our kernels, and compare losses.

    python benchmarks/training_curves.py measure benchmarks/results/training-curves-h200.json
    python benchmarks/training_curves.py figure benchmarks/results/training-curves-h200.json docs/results/curves.svg

Bytes are the tokens; the text is every page of docs, the README and the license. Weights, batches and their order
are the same for every curve of a precision. `measure` needs a GPU and says whether the bounds hold.
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
# largest distance of two losses at the same step; the losses fall from 5.6. Both precisions round in another order
# with kernels than without, and training carries any difference on
BOUNDS = {"fp32": 0.02, "bf16": 0.1}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
KERNELS = {"eager": None, "ligerprof": "all"}


def read_text() -> bytes:
    pages = [ROOT / "README.md", ROOT / "LICENSE", *sorted((ROOT / "docs").rglob("*.md"))]
    return b"\n".join(page.read_bytes() for page in pages)


def batches(text: bytes) -> Iterator[Any]:
    """Random windows of the text, the same ones every time."""
    import torch

    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(0, len(data) - TOKENS, (BATCH,), generator=generator)
        yield torch.stack([data[start : start + TOKENS] for start in starts]).cuda()


def train(precision: str, kernels: str | None, text: bytes) -> list[float]:
    """The loss of every step."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ligerprof.kernels import apply

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **CONFIG)
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).cuda()
    model = model.to(getattr(torch, DTYPES[precision])).train()
    if kernels is not None:
        apply(model, kernels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
    losses = []
    for ids in batches(text):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in torch.stack(losses).float().cpu()]


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(left - right) for left, right in zip(one, other, strict=True))


def measure(results: Path) -> None:
    import torch

    from ligerprof.runs.versions import package_versions

    text = read_text()
    curves = {
        precision: {name: train(precision, kernels, text) for name, kernels in KERNELS.items()} for precision in DTYPES
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
        "bounds": BOUNDS,
        "curves": curves,
    }
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(result) + "\n")


def verdicts(result: dict[str, Any]) -> Iterator[str]:
    curves = result["curves"]
    for precision, bound in result["bounds"].items():
        eager, ours = curves[precision]["eager"], curves[precision]["ligerprof"]
        far = distance(eager, ours)
        verdict = "within" if far <= bound else "BEYOND"
        yield f"{precision}: {eager[0]:.3f} to {eager[-1]:.3f}; largest distance {far:.5f}, {verdict} {bound}"
    between = distance(curves["fp32"]["eager"], curves["bf16"]["eager"])
    yield f"for comparison, eager in bf16 from eager in fp32: {between:.5f}"


def draw(result: dict[str, Any], figure_file: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(2, 1))
    for precision, color in (("fp32", "tab:blue"), ("bf16", "tab:orange")):
        eager, ours = (result["curves"][precision][name] for name in KERNELS)
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
