"""Train example configurations with transformers' Trainer, and compare the estimates for the same files.

    python benchmarks/framework_configs.py measure RESULTS.jsonl   # on a GPU, with peft, bitsandbytes and deepspeed
    python benchmarks/framework_configs.py score RESULTS.jsonl     # anywhere
    python benchmarks/framework_configs.py measure RESULTS.jsonl --only zero,ds_config --gpus 2

The files are those of tests/data/configs. axolotl, LLaMA-Factory and TRL train with subclasses of the Trainer: the
Trainer gets each file's own keys as its framework passes them on, without ligerprof's reader of configurations. Weights
and tokens are random, every batch is full, and attention is SDPA, so that FlashAttention need not be installed.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import ligerprof
from ligerprof.models import load_model
from ligerprof.recipe.configs.resolve import load_recipe
from ligerprof.units import GIB, MIB

FILES = Path(__file__).parents[1] / "tests/data/configs/files"
AXOLOTL, FACTORY = "axolotl-ai-cloud+axolotl", "hiyouga+LLaMA-Factory"
ACCELERATE, EXAMPLES = "huggingface+accelerate/examples", "deepspeedai+DeepSpeedExamples/training"
STEPS = 3
SHARED_BYTES = 64 * GIB
OPTIMIZERS = {
    "adamw_8bit": "adamw_bnb_8bit",
    "adamw_bnb_8bit": "adamw_bnb_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "paged_adamw_32bit": "paged_adamw_32bit",
    "adamw_torch": "adamw_torch",
    "adamw_torch_fused": "adamw_torch_fused",
}
CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A file, and the recipe options that it leaves open or that this machine cannot carry out."""

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)


OPEN: dict[str, Any] = {"model": "llama3.2-1b", "batch": 4, "seq": 1024}
CASES = (
    Case(path=f"{AXOLOTL}/examples/llama-3/lora-1b.yml"),
    Case(path=f"{AXOLOTL}/examples/llama-3/qlora-1b.yml"),
    Case(path=f"{AXOLOTL}/examples/llama-3/fft-8b.yaml"),
    Case(path=f"{AXOLOTL}/examples/llama-2/qlora.yml"),
    Case(path=f"{AXOLOTL}/examples/mistral/config.yml", options={"seq": 4096}),
    Case(path=f"{AXOLOTL}/examples/gemma2/qlora.yml"),
    Case(path=f"{AXOLOTL}/examples/phi/phi3-ft.yml"),
    Case(path=f"{AXOLOTL}/examples/streaming/pretrain.yaml"),
    Case(path=f"{AXOLOTL}/examples/streaming/sft.yaml", options={"batch": 4}),
    Case(path=f"{AXOLOTL}/examples/archived/tiny-llama/pretrain.yml"),
    Case(path=f"{FACTORY}/examples/train_lora/qwen3_lora_sft.yaml"),
    Case(path=f"{FACTORY}/examples/train_lora/qwen3_lora_pretrain.yaml", options={"batch": 2}),
    Case(path=f"{FACTORY}/examples/train_qlora/qwen3_lora_sft_otfq.yaml"),
    Case(path=f"{FACTORY}/examples/extras/loraplus/llama3_lora_sft.yaml"),
    Case(path="huggingface+trl/trl/accelerate_configs/single_gpu.yaml", options={**OPEN, "clip": 1.0}),
    Case(path=f"{ACCELERATE}/deepspeed_config_templates/zero_stage1_config.json", options=OPEN),
    Case(path=f"{ACCELERATE}/deepspeed_config_templates/zero_stage2_offload_config.json", options=OPEN),
    Case(path=f"{ACCELERATE}/deepspeed_config_templates/zero_stage3_offload_config.json", options=OPEN),
    Case(path=f"{AXOLOTL}/deepspeed_configs/zero3_bf16_cpuoffload_all.json", options={**OPEN, "batch": 2}),
    Case(path=f"{EXAMPLES}/autotuning/hf/dsconfigs/ds_config_fp16_z3.json", options={**OPEN, "batch": 8, "seq": 512}),
)


def recipe_of(case: Case) -> ligerprof.TrainingRecipe:
    """The recipe of a file, with packing off: every sequence is one full document."""
    text = (FILES / case.path).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, Path(case.path).name)
        file.write_text(text.replace("sample_packing: true", "sample_packing: false"), encoding="utf-8")
        recipe, _ = load_recipe([str(file)], {"attention": "sdpa", **case.options})
    return recipe


def settings_of(case: Case) -> dict[str, Any]:
    """What the framework passes on: arguments of the Trainer, and how it loads and adapts the model."""
    text = (FILES / case.path).read_text(encoding="utf-8")
    values = json.loads(text) if case.path.endswith(".json") else yaml.safe_load(text)
    if "deepspeed_configs" in case.path or case.path.endswith(".json"):
        found = trainer_with_deepspeed(values)
    elif case.path.startswith(AXOLOTL):
        found = trainer_of_axolotl(values)
    elif case.path.startswith(FACTORY):
        found = trainer_of_llama_factory(values)
    else:
        arguments = {"bf16": values["mixed_precision"] == "bf16", "optim": "adamw_torch_fused", **CHECKPOINTED}
        found = {"arguments": arguments, "dtype": "float32"}
    given = {"batch": "per_device_train_batch_size", "clip": "max_grad_norm"}
    found["arguments"] |= {given[name]: value for name, value in case.options.items() if name in given}
    return {
        "lora": None,
        "in_4_bit": False,
        **found,
        **{k: v for k, v in case.options.items() if k in ("model", "seq")},
    }


def trainer_of_axolotl(values: Mapping[str, Any]) -> dict[str, Any]:
    checkpointing = bool(values.get("gradient_checkpointing"))
    arguments = {
        "per_device_train_batch_size": values["micro_batch_size"],
        "gradient_accumulation_steps": values["gradient_accumulation_steps"],
        "optim": OPTIMIZERS[values["optimizer"]],
        "bf16": values.get("bf16") in (True, "auto"),
        "gradient_checkpointing": checkpointing,
        "gradient_checkpointing_kwargs": values.get("gradient_checkpointing_kwargs") or {"use_reentrant": False},
    }
    lora = None
    if values.get("adapter"):
        targets = ALL_LINEAR if values.get("lora_target_linear") else values["lora_target_modules"]
        lora = {
            "r": values["lora_r"],
            "lora_alpha": values["lora_alpha"],
            "lora_dropout": values.get("lora_dropout") or 0.0,
            "target_modules": "all-linear" if values.get("lora_target_linear") else targets,
        }
    return {
        "arguments": arguments,
        "model": values["base_model"],
        "seq": values["sequence_len"],
        "dtype": "bfloat16" if arguments["bf16"] else "float32",
        "lora": lora,
        "in_4_bit": bool(values.get("load_in_4bit")),
    }


def trainer_of_llama_factory(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "arguments": {
            "per_device_train_batch_size": values["per_device_train_batch_size"],
            "gradient_accumulation_steps": values["gradient_accumulation_steps"],
            "optim": "adamw_torch_fused",
            "bf16": values["bf16"],
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": values.get("use_reentrant_gc", True)},
        },
        "model": values["model_name_or_path"],
        "seq": values["cutoff_len"],
        "dtype": "bfloat16",
        "lora": {
            "r": values.get("lora_rank", 8),
            "lora_alpha": 2 * values.get("lora_rank", 8),
            "lora_dropout": values.get("lora_dropout", 0.0),
            "target_modules": "all-linear",
        },
        "in_4_bit": values.get("quantization_bit") == 4,
    }


def trainer_with_deepspeed(values: dict[str, Any]) -> dict[str, Any]:
    fp16 = bool(values.get("fp16", {}).get("enabled"))
    if fp16:
        # the usual first scale of 2^16 overflows here, and a step that overflows is skipped
        values["fp16"]["initial_scale_power"] = 4
    arguments = {
        "deepspeed": values,
        "fp16": fp16,
        "bf16": not fp16,
        "warmup_steps": 1,
        **CHECKPOINTED,
    }
    for key, name in (
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("gradient_clipping", "max_grad_norm"),
    ):
        if key in values and values[key] != "auto":
            arguments[name] = values[key]
    return {"arguments": arguments, "dtype": "float16" if fp16 else "bfloat16"}


def train(settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train a few steps; the peaks of each, from torch's own counters."""
    import torch
    from transformers import AutoConfig, Trainer, TrainerCallback, TrainingArguments, set_seed

    class Peaks(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.allocated: list[int] = []
            self.reserved: list[int] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.reset_peak_memory_stats()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.allocated.append(torch.cuda.max_memory_allocated())
            self.reserved.append(torch.cuda.max_memory_reserved())

    set_seed(0)
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        **settings["arguments"],
    )
    values = dict(load_model(settings["model"]).config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.use_cache = False
    model = load_weights(config, settings, folder)
    seq, vocabulary = settings["seq"], config.vocab_size

    class Tokens(torch.utils.data.Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, _: int) -> dict[str, Any]:
            tokens = torch.randint(vocabulary, (seq,))
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}

    peaks = Peaks()
    Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=[peaks]).train()
    return {"allocated": peaks.allocated, "reserved": peaks.reserved}


def load_weights(config: Any, settings: dict[str, Any], folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, settings["dtype"])
    sharded = "deepspeed" in settings["arguments"]
    with torch.device("cpu" if sharded else "cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if settings["in_4_bit"]:
        from transformers import BitsAndBytesConfig

        model.save_pretrained(folder)
        del model
        quantized = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantized, dtype=dtype, attn_implementation="sdpa", device_map={"": 0}
        )
    if settings["lora"]:
        from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

        if settings["in_4_bit"]:
            model = prepare_model_for_kbit_training(
                model,
                use_gradient_checkpointing=settings["arguments"]["gradient_checkpointing"],
                gradient_checkpointing_kwargs=settings["arguments"]["gradient_checkpointing_kwargs"],
            )
            # peft widens what is not in 4 bits; axolotl narrows it again for FlashAttention, LLaMA-Factory does neither
            for name, module in model.named_modules():
                if name.endswith(("embed_tokens", "lm_head", "norm")):
                    module.to(dtype)
        elif settings["arguments"]["gradient_checkpointing"]:
            model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings["lora"]))
    return model


def measure(results: Path, only: list[str], gpus: int) -> None:
    import torch

    free = SHARED_BYTES
    changed = threading.Condition()
    order = sorted(range(len(CASES)), key=lambda number: -needed_bytes(CASES[number]))

    def run(number: int) -> dict[str, Any]:
        nonlocal free
        case = CASES[number]
        if only and not any(word in case.path for word in only):
            return {}
        needed = min(needed_bytes(case), SHARED_BYTES)
        with changed:
            changed.wait_for(lambda: free >= needed)
            free -= needed
        try:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                return run_child(number, folder, gpus)
        finally:
            with changed:
                free += needed
                changed.notify_all()

    where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "gpus": gpus}
    with ThreadPoolExecutor(5) as pool, results.open("w", encoding="utf-8") as file:
        runs = {pool.submit(run, number): CASES[number] for number in order}
        for done in as_completed(runs):
            if row := done.result():
                case = runs[done]
                file.write(json.dumps({"path": case.path, "options": dict(case.options), **where, **row}) + "\n")
                file.flush()
                print(case.path, row.get("allocated", row.get("error")), flush=True)


def needed_bytes(case: Case) -> int:
    peak_bytes = ligerprof.estimate(recipe_of(case)).peak_bytes
    return int(1.2 * peak_bytes) + 2 * GIB


def run_child(number: int, folder: str, gpus: int) -> dict[str, Any]:
    """The peaks of a case, on several GPUs those of the rank with the highest one."""
    # one rank, so that the Trainer can start DeepSpeed
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    sharded = "deepspeed" in settings_of(CASES[number])["arguments"]
    command, extra = [sys.executable], {}
    if gpus > 1:
        if not sharded:
            return {}
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={gpus}", "--rdzv-backend=c10d"]
        command += ["--rdzv-endpoint=127.0.0.1:0"]
    elif sharded:
        extra = {**environment, "MASTER_PORT": str(29600 + number)}
    done = subprocess.run(
        [*command, __file__, "train", str(number), folder],
        check=False,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, **extra},
    )
    # ranks may write in one line
    ranks = [json.loads(found) for found in re.findall(r'\{"allocated"[^}]*\}', done.stdout)]
    if len(ranks) < gpus:
        return {"error": done.stderr[-1500:]}
    worst: dict[str, Any] = max(ranks, key=lambda rank: max(rank["allocated"][1:]))
    return worst


def score(results: Path) -> None:
    errors = []
    print(f"{'measured':>10} {'estimate':>10} {'error':>8} {'1st step':>8} {'reserved':>9}  configuration")
    for line in results.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "error" in row:
            print(f"{'failed':>10} {row['error'].strip().splitlines()[-1][:60]}  {row['path']}")
            continue
        recipe = recipe_of(Case(path=row["path"], options={"gpus": row.get("gpus", 1), **row["options"]}))
        estimated = ligerprof.estimate(recipe)
        peak_bytes = max(row["allocated"][1:])
        error = estimated.peak_bytes / peak_bytes - 1
        first = estimated.first_step_peak_bytes / row["allocated"][0] - 1
        reserved = max(row["reserved"])
        errors.append(abs(error))
        print(
            f"{peak_bytes / MIB:10.1f} {estimated.peak_bytes / MIB:10.1f} {error:+8.2%} {first:+8.2%}"
            f" {reserved / MIB:9.0f}  {row['path'].partition('+')[2]}"
            + (f" on {recipe.gpus} GPUs" if recipe.gpus > 1 else "")
        )
    if errors:
        print(f"{len(errors)} configurations: median {statistics.median(errors):.2%}, largest {max(errors):.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("do", choices=("measure", "score", "train"))
    parser.add_argument("results")
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--only", default="", help="words of paths, joined by commas")
    parser.add_argument("--gpus", type=int, default=1, help="ranks of the cases that train under DeepSpeed")
    arguments = parser.parse_args()
    if arguments.do == "train":
        print(json.dumps(train(settings_of(CASES[int(arguments.results)]), arguments.folder)), flush=True)
    elif arguments.do == "measure":
        measure(Path(arguments.results), [word for word in arguments.only.split(",") if word], arguments.gpus)
    else:
        score(Path(arguments.results))


if __name__ == "__main__":
    main()
