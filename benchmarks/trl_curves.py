"""TRL's DPO and GRPO with our log-probabilities against TRL's own: losses of 20 steps in fp32, peak and tokens/s.

A small Qwen2 with random weights and TF32 off trains twice from one seed. GRPO generates with `generate`, so its second
run has the completions of the first one as long as the losses agree. `measure` appends one JSON line per trainer.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import ligerprof.kernels
from ligerprof.runs.outcome import package_versions

STEPS, PAIRS, LENGTH, COMPLETION = 20, 4, 256, 32
ALLOWED = 1e-3


def tokenizer(words: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, words)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def saved_model(folder: str, words: int, *, tiny: bool) -> str:
    """A path, from which TRL loads the policy and the reference."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = (64, 128, 2, 2) if tiny else (512, 1024, 4, 8)
    hidden, intermediate, layers, heads = sizes
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        vocab_size=words,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    path = str(Path(folder) / "model")
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def text(generator: torch.Generator, words: int, length: int) -> str:
    return " ".join(f"w{i}" for i in torch.randint(3, words, (length,), generator=generator).tolist())


def common(folder: str, device: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": PAIRS,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": device == "cpu",
        "model_init_kwargs": {"dtype": "float32"},
        "seed": 0,
        "disable_tqdm": True,
    }


def dpo(folder: str, device: str, words: int, length: int) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    generator = torch.Generator().manual_seed(1)
    rows = [
        {
            name: text(generator, words, length // 2) + " " * (name == "prompt")
            for name in ("prompt", "chosen", "rejected")
        }
        for _ in range(STEPS * PAIRS)
    ]
    arguments = DPOConfig(**common(folder, device), max_length=length)
    path = saved_model(folder, words, tiny=device == "cpu")
    return DPOTrainer(path, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(words))


def grpo(folder: str, device: str, words: int, length: int) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    generator = torch.Generator().manual_seed(1)
    rows = [{"prompt": text(generator, words, length // 4)} for _ in range(STEPS * PAIRS)]

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [sum(int(word[1:]) % 7 for word in text.split() if word[:1] == "w") / 50 for text in completions]

    arguments = GRPOConfig(
        **common(folder, device), num_generations=PAIRS, max_completion_length=COMPLETION, beta=0.04, temperature=1.0
    )
    return GRPOTrainer(
        saved_model(folder, words, tiny=device == "cpu"),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(words),
    )


MAKERS: dict[str, Callable[..., Any]] = {"dpo": dpo, "grpo": grpo}


def train(name: str, device: str, words: int, length: int, *, ours: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = MAKERS[name](folder, device, words, length)
        patch = ligerprof.kernels.apply(trainer, name) if ours else nullcontext()
        with patch:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            trainer.train()
            seconds = time.perf_counter() - began
        logs = [row for row in trainer.state.log_history if "loss" in row]
        return {
            "losses": [row["loss"] for row in logs],
            "grad_norms": [float(row["grad_norm"]) for row in logs if "grad_norm" in row],
            "seconds": seconds,
            "tokens_per_second": 2 * PAIRS * STEPS * length / seconds if name == "dpo" else None,
            "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        }


def measure(device: str) -> Iterator[dict[str, Any]]:
    words, length = (300, 16) if device == "cpu" else (50000, LENGTH)
    for name in MAKERS:
        runs = {}
        # the first run of a trainer also compiles
        for who, ours in (("warm-up", True), ("TRL", False), ("ligerprof", True)):
            runs[who] = train(name, device, words, length, ours=ours)
        del runs["warm-up"]
        pairs = zip(runs["TRL"]["losses"], runs["ligerprof"]["losses"], strict=True)
        yield {
            "schema": 1,
            "kind": "trl_curves",
            "date": time.strftime("%Y-%m-%d"),
            "gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "versions": dict(package_versions()),
            "trainer": name,
            "runs": runs,
            "largest_difference": max(abs(one - other) for one, other in pairs),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    for row in measure("cuda" if torch.cuda.is_available() else "cpu"):
        with arguments.results.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        verdict = "within" if row["largest_difference"] <= ALLOWED else "BEYOND"
        for who, run in row["runs"].items():
            print(row["trainer"], who, f"{statistics.mean(run['losses']):.6f}", run["seconds"], run["peak_bytes"])
        print(row["trainer"], f"losses differ by {row['largest_difference']:.2e}, {verdict} {ALLOWED}")


if __name__ == "__main__":
    main()
