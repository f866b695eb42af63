"""Writes what the programs read: models of random weights, a tokenizer of words, data sets, TRL's configurations.

python make.py FOLDER [--set held-out] [--tiny] [--empty]
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import held_out_cases
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

MODELS: dict[str, dict[str, Any]] = {
    "smol": {
        "model_type": "llama",
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 16,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    "qwen2": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 12,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "phi3": {
        "model_type": "phi3",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    "gemma": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 65536,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
    },
    "llama1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
    # the sizes of Qwen3-0.6B and Qwen3-1.7B
    "qwen-06b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
    "qwen-17b": {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
    "experts": {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 512,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
    },
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
COMMON: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-5,
    "bf16": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "report_to": "none",
    "seed": 1,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }} </s> {% endgeneration %}{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
)


def write_empty(folder: Path, model: torch.nn.Module) -> None:
    """Weights of zeros in a file with a hole, for machines that read their shapes alone."""
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in model.state_dict().items():
        if name not in tied or not model.config.tie_word_embeddings:
            begin, end = end, end + tensor.nbytes
            header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_model(folder: Path, config: dict[str, Any], empty: bool) -> None:
    config = {**config, **SPECIAL}
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    device = "meta" if empty else "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    if empty:
        write_empty(folder, model)
    else:
        model.save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, made.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.model_max_length, fast.chat_template = 32768, CHAT
    fast.save_pretrained(folder)


def write_data(root: Path, tiny: bool) -> None:
    """The data sets; the lengths differ from row to row, but for those that are cut to one length."""
    draw, top, scale = random.Random(0), 500 if tiny else 30000, 0.05 if tiny else 1.0

    def words(low: int, high: int) -> str:
        count = draw.randint(max(int(low * scale), 2), max(int(high * scale), 3))
        return " ".join(f"w{draw.randrange(4, top)}" for _ in range(count))

    def talk() -> list[dict[str, str]]:
        return [{"role": role, "content": words(40, 300)} for role in ("user", "assistant", "user", "assistant")]

    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "text": lambda: {"text": words(200, 1600)},
        "completion": lambda: {"prompt": words(50, 500), "completion": words(50, 900)},
        "chat": lambda: {"messages": talk()},
        "preference": lambda: {"prompt": words(64, 256), "chosen": words(100, 800), "rejected": words(100, 800)},
        "pairs": lambda: {"chosen": words(200, 1500), "rejected": words(200, 1500)},
        "judged": lambda: {"prompt": words(64, 256), "completion": words(100, 700), "label": draw.random() < 0.5},
        "prompts": lambda: {"prompt": words(60, 200)},
        "long": lambda: {"text": words(2300, 2300)},
        "long-pairs": lambda: {"prompt": words(256, 256), "chosen": words(2300, 2300), "rejected": words(2300, 2300)},
    }
    for name, row in kinds.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for split, count in (("train", 96 if "long" in name else 64), ("test", 16)):
            lines = "".join(json.dumps(row()) + "\n" for _ in range(count))
            (root / name / f"{split}.jsonl").write_text(lines)


def trl_configurations() -> dict[str, tuple[str, str, dict[str, Any]]]:
    """TRL's configurations by name: model, data set, options; the part before the first hyphen names the script."""

    def run(model: str, data: str, **options: Any) -> tuple[str, str, dict[str, Any]]:
        return model, data, options

    def long(model: str, data: str = "long", **options: Any) -> dict[str, Any]:
        return run(model, data, **{"gradient_checkpointing": True, "max_length": 1024, **options})

    lora = {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear", "dtype": "bfloat16"}
    adapters = {"use_peft": True, "lora_r": 16, "lora_target_modules": "all-linear"}
    policy = {"max_steps": 2, "per_device_train_batch_size": 8, "beta": 0.04, "dtype": "bfloat16"}
    online = {"reward_funcs": ["get_soft_overlong_punishment"], "num_generations": 4, "max_completion_length": 64}
    return {
        "sft-completion": run("smol", "completion", gradient_checkpointing=False, max_length=1024, optim="adamw_torch"),
        "sft-dora": run(
            "phi3", "text", **lora, use_dora=True, packing=True, packing_strategy="wrapped", max_length=1024
        ),
        "sft-assistant": run(
            "smol",
            "chat",
            assistant_only_loss=True,
            activation_offloading=True,
            gradient_checkpointing=False,
            gradient_accumulation_steps=2,
            dtype="bfloat16",
            max_length=1024,
        ),
        "sft-evaluated": run(
            "gemma",
            "text",
            max_steps=4,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            save_total_limit=1,
            load_best_model_at_end=True,
            neftune_noise_alpha=5,
            per_device_train_batch_size=2,
            max_length=1280,
        ),
        "sft-dft": run("smol", "text", loss_type="dft", max_length=768, optim="adafactor", dtype="bfloat16"),
        "sft-liger": run(
            "qwen3",
            "completion",
            use_liger_kernel=True,
            dtype="bfloat16",
            max_length=1024,
            gradient_checkpointing=False,
        ),
        "dpo-reference": run(
            "smol",
            "preference",
            dtype="bfloat16",
            max_length=1024,
            per_device_train_batch_size=2,
            eval_strategy="steps",
            eval_steps=2,
        ),
        "dpo-precomputed": run(
            "qwen3", "preference", **lora, precompute_ref_log_probs=True, loss_type=["ipo"], max_length=768
        ),
        "reward-pairs": run(
            "qwen3",
            "pairs",
            center_rewards_coefficient=0.01,
            max_length=1024,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=2,
        ),
        "grpo-reference": run(
            "smol",
            "prompts",
            **online,
            beta=0.04,
            num_iterations=2,
            dtype="bfloat16",
            per_device_train_batch_size=8,
        ),
        **{
            f"grpo-{size}{name}": run(f"qwen-{size}", "prompts", **online, **policy, **options)
            for size in ("06b", "17b")
            for name, options in {"": {}, "-lora": adapters}.items()
        },
        "distillation-06b": run(
            "qwen3",
            "prompts",
            teacher_model_name_or_path="qwen-06b",
            dtype="bfloat16",
            max_completion_length=64,
            max_steps=2,
        ),
        "rloo-lora": run("phi3", "prompts", **online, **lora),
        "kto-lora": run("smol", "judged", **lora, max_length=1024),
        "sft-lora-1b": long("llama1b", gradient_accumulation_steps=2, **adapters),
        "sft-full-1b-liger": long("llama1b", dtype="bfloat16", use_liger_kernel=True, optim="adamw_torch_fused"),
        "sft-moe": long("experts", per_device_train_batch_size=2, dtype="bfloat16", optim="adafactor"),
        "sft-packing": long(
            "llama1b",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_length=2048,
            packing=True,
            dtype="bfloat16",
            **adapters | {"lora_r": 32},
        ),
        "sft-nll-reentrant": long(
            "llama1b",
            per_device_train_batch_size=3,
            max_length=777,
            loss_type="nll",
            gradient_checkpointing_kwargs={"use_reentrant": True},
            dtype="bfloat16",
            optim="sgd",
        ),
        "dpo-lora-1b": long(
            "llama1b",
            "long-pairs",
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            dtype="bfloat16",
            **adapters,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--set", choices=["known", "held-out"], default="known", help="the programs to write for")
    parser.add_argument("--tiny", action="store_true", help="small models and short rows, to try the programs on a CPU")
    parser.add_argument("--empty", action="store_true", help="weights of zeros that take no space on the disk")
    arguments = parser.parse_args()
    root = arguments.folder.resolve()
    held_out = arguments.set == "held-out"
    for name, config in (held_out_cases.MODELS if held_out else MODELS).items():
        small = {**TINY, **({"head_dim": 16} if "head_dim" in config else {})} if arguments.tiny else {}
        small |= {"moe_intermediate_size": 32} if arguments.tiny and "num_experts" in config else {}
        write_model(root / name, {**config, **small}, arguments.empty)
    write_data(root, arguments.tiny)
    (root / "configs").mkdir(exist_ok=True)
    for name, (model, data, options) in (held_out_cases.TRL if held_out else trl_configurations()).items():
        off = {}
        if arguments.tiny:  # a CPU has none of these
            off = {"bf16": False, "activation_offloading": False, "use_liger_kernel": False}
        folders = {"model_name_or_path": f"{root}/{model}", "dataset_name": f"{root}/{data}"}
        if teacher := options.get("teacher_model_name_or_path"):
            folders["teacher_model_name_or_path"] = f"{root}/{teacher}"
        config = {**COMMON, **options, **off, **folders, "output_dir": f"{root}/out/{name}"}
        (root / "configs" / f"{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


if __name__ == "__main__":
    main()
