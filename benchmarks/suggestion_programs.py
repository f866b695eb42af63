"""Small training programs, one per framework, that can make each change that `ligerprof explain` suggests.

    python benchmarks/suggestion_programs.py trainer build/trainer.json --record build/trainer.pickle
    python benchmarks/suggestion_programs.py trainer build/changed.json --change checkpointing

Run by `suggestions.py`. A program trains three steps as its framework's users would, and knows nothing of ligerprof
unless a change is ligerprof's own kernel. The JSON file gets max_memory_allocated. `--device cpu` only checks that
programs and changes run.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

STEPS = 3
PROGRAMS: dict[str, Callable[["Setting"], None]] = {}


class Setting:
    """The device, the sizes, and the change to make ("" for none)."""

    def __init__(self, device: str, change: str) -> None:
        self.device, self.change = device, change
        self.small = device == "cpu"
        self.vocab, self.seq = (512, 64) if self.small else (64000, 1024)
        self.batch = 4 if self.small else 8

    def does(self, change: str) -> bool:
        """Whether this is the change to make."""
        return self.change == change

    def batches(self, batch: int | None = None) -> Iterator[torch.Tensor]:
        """Tokens of each step."""
        for _ in range(STEPS):
            yield torch.randint(0, self.vocab, (batch or self.batch, self.seq)).to(self.device)

    def autocast(self) -> Any:
        """bf16 autocast."""
        return torch.autocast(self.device, torch.bfloat16)


def program(function: Callable[[Setting], None]) -> Callable[[Setting], None]:
    """Register a program under its name."""
    PROGRAMS[function.__name__.replace("_", "-")] = function
    return function


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the MLP."""
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """A GPT written by hand."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        width, layers, heads = (64, 2, 4) if setting.small else (768, 12, 12)
        self.setting = setting
        self.embedding = nn.Embedding(setting.vocab, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, setting.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Logits and loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.setting.does("checkpointing"):
                from torch.utils.checkpoint import checkpoint

                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        hidden = self.norm(x)
        if self.setting.does("fused-loss"):
            from ligerprof.kernels.linear_cross_entropy.triton import fused_linear_cross_entropy

            return None, fused_linear_cross_entropy(hidden, self.head.weight, labels)
        logits = self.head(hidden)
        return logits, functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def llama(setting: Setting, *, by_trainer: bool = False, **changes: Any) -> Any:
    """A transformers Llama."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    large = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    dtype = changes.pop("dtype", torch.bfloat16)
    attention = changes.pop("attention", "sdpa")
    config = LlamaConfig(
        **(small if setting.small else large),
        num_key_value_heads=4,
        vocab_size=setting.vocab,
        tie_word_embeddings=changes.pop("tied", False),
        max_position_embeddings=4096,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).train()
    if by_trainer:
        return model
    if not setting.does("cpu-offload"):
        model = model.to(setting.device)
    if setting.does("fused-loss"):
        import ligerprof.kernels

        ligerprof.kernels.apply(model, "flce")
    if setting.does("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def optimizer_of(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with torch's default, foreach on a GPU."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True if setting.does("fused-optimizer") else None)


def parts_of(setting: Setting, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The micro-batches of a step."""
    return batch.chunk(2) if setting.does("half-batch") else (batch,)


@program
def torch_loop(setting: Setting) -> None:
    """Autocast; gradients are zeroed before backward, and logits live on into the next step."""
    model = Gpt(setting).to(setting.device)
    train_gpt(setting, model, optimizer_of(setting, model))


@program
def torch_small_batch(setting: Setting) -> None:
    """The same with few tokens, so that the optimizer step has the peak."""
    setting.batch, setting.seq = 2, setting.seq // 2
    model = Gpt(setting).to(setting.device)
    train_gpt(setting, model, optimizer_of(setting, model))


@program
def torch_late_zero(setting: Setting) -> None:
    """The same with a fused optimizer, so that forward has the peak, next to the gradients of the step before."""
    setting.batch, setting.seq = 2, setting.seq // 4
    model = Gpt(setting).to(setting.device)
    train_gpt(setting, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def train_gpt(setting: Setting, model: Gpt, optimizer: torch.optim.Optimizer) -> None:
    """Zero gradients between forward and backward, and keep the logits."""
    for batch in setting.batches():
        for number, tokens in enumerate(parts_of(setting, batch)):
            with setting.autocast():
                logits, loss = model(tokens, tokens)
            if not setting.does("zero-grad") and number == 0:
                optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if setting.does("del-outputs"):
                del logits, loss
        optimizer.step()
        if setting.does("zero-grad"):
            optimizer.zero_grad(set_to_none=True)


def train_llama(setting: Setting, model: Any, optimizer: torch.optim.Optimizer, *, autocast: bool) -> None:
    """A loop over `outputs.loss`, gradients zeroed after each step."""
    for batch in setting.batches():
        for tokens in parts_of(setting, batch):
            with setting.autocast() if autocast else nullcontext():
                outputs = model(input_ids=tokens, labels=tokens)
            outputs.loss.backward()
            if setting.does("del-outputs"):
                del outputs
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@program
def transformers_loop(setting: Setting) -> None:
    """bf16 weights and tied embeddings in a loop of its own."""
    model = llama(setting, tied=True)
    train_llama(setting, model, optimizer_of(setting, model), autocast=False)


@program
def transformers_eager(setting: Setting) -> None:
    """fp32 weights, autocast, and eager attention."""
    attention = "sdpa" if setting.does("sdpa") else "eager"
    model = llama(setting, dtype=torch.float32, attention=attention)
    setting.batch //= 2
    train_llama(setting, model, optimizer_of(setting, model), autocast=True)


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, self.setting.vocab, (self.setting.seq,))
        return {"input_ids": tokens, "labels": tokens.clone()}


LIGER_ONLY_LOSS = {
    "fused_linear_cross_entropy": True,
    "cross_entropy": False,
    "rope": False,
    "rms_norm": False,
    "swiglu": False,
}


def run_trainer(setting: Setting, model: Any, **arguments: Any) -> None:
    """Transformers' Trainer, with the change as an argument."""
    from transformers import Trainer, TrainingArguments

    half = setting.does("half-batch")
    changes: dict[str, dict[str, Any]] = {
        "checkpointing": {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        },
        "fused-optimizer": {"optim": "adamw_torch_fused"},
        "fused-loss": {"use_liger_kernel": True, "liger_kernel_config": LIGER_ONLY_LOSS},
        "half-batch": {"gradient_accumulation_steps": 2},
    }
    made = TrainingArguments(
        output_dir="/tmp/suggestions-trainer",
        max_steps=STEPS,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=setting.small,
        per_device_train_batch_size=setting.batch // 2 if half else setting.batch,
        **{**arguments, **changes.get(setting.change, {})},
    )
    Trainer(model=model, args=made, train_dataset=Samples(setting)).train()


@program
def trainer(setting: Setting) -> None:
    """fp32 weights, bf16 autocast, foreach AdamW."""
    run_trainer(setting, llama(setting, dtype=torch.float32, by_trainer=True), bf16=True, optim="adamw_torch")


@program
def trainer_checkpointed(setting: Setting) -> None:
    """bf16 weights, tied, fused AdamW, checkpointing."""
    run_trainer(setting, llama(setting, tied=True, by_trainer=True), gradient_checkpointing=True)


@program
def accelerate_loop(setting: Setting) -> None:
    """accelerate, bf16 mixed precision."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=setting.small)
    model = llama(setting, dtype=torch.float32)
    model, optimizer = accelerator.prepare(model, optimizer_of(setting, model))
    for batch in setting.batches():
        for tokens in parts_of(setting, batch):
            outputs = model(input_ids=tokens, labels=tokens)
            accelerator.backward(outputs.loss)
            if setting.does("del-outputs"):
                del outputs
        optimizer.step()
        optimizer.zero_grad()


def start_process_group(setting: Setting) -> None:
    """A group of this process alone."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo" if setting.small else "nccl", store=store, rank=0, world_size=1)


@program
def ddp(setting: Setting) -> None:
    """DistributedDataParallel."""
    start_process_group(setting)
    inner = llama(setting, dtype=torch.float32)
    model = nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=setting.does("bucket-views"))
    setting.batch //= 2
    train_llama(setting, model, optimizer_of(setting, model), autocast=True)


@program
def ddp_small_batch(setting: Setting) -> None:
    """The same with few tokens."""
    setting.batch, setting.seq = 4, setting.seq // 4
    ddp(setting)


@program
def fsdp2(setting: Setting) -> None:
    """fully_shard without resharding after forward."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    start_process_group(setting)
    model = llama(setting, dtype=torch.float32)
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "reshard_after_forward": setting.does("reshard"),
        "offload_policy": CPUOffloadPolicy() if setting.does("cpu-offload") else OffloadPolicy(),
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    setting.batch //= 2
    train_llama(setting, model, optimizer_of(setting, model), autocast=False)


def run_deepspeed(setting: Setting, stage: int) -> None:
    """deepspeed.initialize, bf16."""
    import deepspeed

    start_process_group(setting)
    zero: dict[str, Any] = {"stage": stage}
    if setting.does("small-buckets"):
        zero["reduce_bucket_size"] = 50_000_000
    if setting.does("offload-optimizer"):
        zero["offload_optimizer"] = {"device": "cpu"}
    micro_batch = setting.batch // 2 // (2 if setting.does("half-batch") else 1)
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 2 if setting.does("half-batch") else 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }
    model = llama(setting)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(setting, model), config=config)
    for batch in setting.batches(setting.batch // 2):
        for tokens in parts_of(setting, batch):
            outputs = engine(input_ids=tokens, labels=tokens)
            engine.backward(outputs.loss)
            engine.step()
            if setting.does("del-outputs"):
                del outputs


@program
def deepspeed_2(setting: Setting) -> None:
    """ZeRO-2."""
    run_deepspeed(setting, 2)


@program
def deepspeed_3(setting: Setting) -> None:
    """ZeRO-3."""
    run_deepspeed(setting, 3)


def main() -> None:
    """Run one program in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=sorted(PROGRAMS))
    parser.add_argument("result", type=Path)
    parser.add_argument("--change", default="")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and options.record:
        torch.cuda.memory._record_memory_history(max_entries=2_000_000, stacks="all", context="alloc")
    torch.manual_seed(0)
    PROGRAMS[options.program](Setting(options.device, options.change))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    figures = {"torch": torch.__version__, "python": sys.version.partition(" ")[0]}
    if on_gpu:
        torch.cuda.synchronize()
        figures["peak_bytes"] = torch.cuda.max_memory_allocated()
        figures["gpu"] = torch.cuda.get_device_name()
        if options.record:
            torch.cuda.memory._dump_snapshot(str(options.record))
    options.result.write_text(json.dumps(figures) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
