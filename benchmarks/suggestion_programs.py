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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import suggestion_trainers  # noqa: F401 - registers its programs
import torch
from suggestion_models import PROGRAMS, Gpt, Setting, gpt, llama, optimizer_of, parts_of, program
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook


@program
def torch_loop(setting: Setting) -> None:
    """Autocast; gradients are zeroed before backward, and logits live on into the next step."""
    model = gpt(setting)
    train_gpt(setting, model, optimizer_of(setting, model))


@program
def torch_small_batch(setting: Setting) -> None:
    """The same with few tokens, so that the optimizer step has the peak."""
    setting.batch, setting.seq = 2, setting.seq // 2
    model = gpt(setting)
    train_gpt(setting, model, optimizer_of(setting, model))


@program
def torch_late_zero(setting: Setting) -> None:
    """The same with a fused optimizer, so that forward has the peak, next to the gradients of the step before."""
    setting.batch, setting.seq = 2, setting.seq // 4
    model = gpt(setting)
    train_gpt(setting, model, optimizer_of(setting, model, fused=True))


@program
def torch_kept_outputs(setting: Setting) -> None:
    """The same, and every step's logits are collected on the GPU."""
    setting.batch, setting.seq = 2, setting.seq // 2
    model, collected = gpt(setting), []
    optimizer = optimizer_of(setting, model, fused=True)
    for batch in setting.batches(steps=5):
        for tokens in parts_of(setting, batch):
            with setting.offload(), setting.autocast():
                logits, loss = model(tokens, tokens)
            loss.backward()
            if logits is not None:
                collected.append(logits.detach().cpu() if setting.does("kept-outputs") else logits.detach())
            del logits, loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@program
def generation(setting: Setting) -> None:
    """Text generation with a cache of keys and values."""
    model = llama(setting).eval()
    prompts = torch.randint(0, setting.vocab, (8 * setting.batch, setting.seq)).to(setting.device)
    for part in prompts.chunk(2) if setting.does("half-prompts") else (prompts,):
        model.generate(part, attention_mask=torch.ones_like(part), max_new_tokens=32, do_sample=False)


def train_gpt(setting: Setting, model: Gpt, optimizer: torch.optim.Optimizer) -> None:
    """Zero gradients between forward and backward, and keep the logits."""
    for batch in setting.batches():
        for number, tokens in enumerate(parts_of(setting, batch)):
            with setting.offload(), setting.autocast():
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
            with setting.offload(), setting.autocast() if autocast else nullcontext():
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


@program
def sft_loop(setting: Setting) -> None:
    """Fine-tuning of a tied Qwen2 on answers alone, clipped, fp32 weights under autocast."""
    setting.batch, setting.seq = 6, setting.seq // 2
    sizes = {"hidden": 896, "intermediate": 4864, "layers": 12, "heads": 14, "kv_heads": 2, "tied": True}
    model = llama(setting, dtype=torch.float32, model_type="qwen2", **sizes)
    optimizer = optimizer_of(setting, model, fused=True)
    for batch in setting.batches():
        for tokens in parts_of(setting, batch):
            labels = tokens.clone()
            labels[:, : setting.seq // 3] = -100
            with setting.offload(), setting.autocast():
                outputs = model(input_ids=tokens, labels=labels, use_cache=False)
            outputs.loss.backward()
            if setting.does("del-outputs"):
                del outputs
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@program
def accelerate_loop(setting: Setting) -> None:
    """accelerate, bf16 mixed precision."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=setting.small)
    model = llama(setting, dtype=torch.float32)
    model, optimizer = accelerator.prepare(model, optimizer_of(setting, model))
    for batch in setting.batches():
        for tokens in parts_of(setting, batch):
            with setting.offload():
                outputs = model(input_ids=tokens, labels=tokens)
            accelerator.backward(outputs.loss)
            if setting.does("del-outputs"):
                del outputs
        optimizer.step()
        optimizer.zero_grad()


def start_process_group(setting: Setting) -> None:
    """A group of the ranks that `suggestions.py` started, or of this process alone."""
    backend = "gloo" if setting.small else "nccl"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group(backend)
        return
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)


@program
def ddp(setting: Setting) -> None:
    """DistributedDataParallel."""
    start_process_group(setting)
    inner = llama(setting, dtype=torch.float32)
    model: nn.Module = inner
    if setting.does("shard-model"):
        from torch.distributed.fsdp import fully_shard

        for layer in inner.model.layers:
            fully_shard(layer)
        fully_shard(inner)
    else:
        model = nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=setting.does("bucket-views"))
    setting.batch //= 2
    if setting.does("shard-optimizer"):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4
        )
    else:
        optimizer = optimizer_of(setting, model)
    train_llama(setting, model, optimizer, autocast=True)


@program
def ddp_two_ranks(setting: Setting) -> None:
    """The same on two GPUs."""
    ddp(setting)


@program
def ddp_two_ranks_small_batch(setting: Setting) -> None:
    """The same with few tokens, so that weights, gradients and states are most of the peak."""
    ddp_small_batch(setting)


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
    zero: dict[str, Any] = {"stage": 3 if setting.does("zero-3") else stage}
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
def deepspeed_2_two_ranks(setting: Setting) -> None:
    """ZeRO-2 on two GPUs."""
    run_deepspeed(setting, 2)


@program
def deepspeed_3(setting: Setting) -> None:
    """ZeRO-3."""
    run_deepspeed(setting, 3)


def take_peak() -> int:
    """max_memory_allocated since the last call."""
    peak_bytes = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak_bytes


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
    rank = int(os.environ.get("RANK", "0"))
    if on_gpu:
        torch.cuda.set_device(rank)
    if on_gpu and options.record:
        torch.cuda.memory._record_memory_history(max_entries=2_000_000, stacks="all", context="alloc")
    torch.manual_seed(rank)
    peaks: list[int] = []
    if on_gpu:
        register_optimizer_step_post_hook(lambda *_arguments: peaks.append(take_peak()))
    PROGRAMS[options.program](Setting(options.device, options.change))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    figures: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.partition(" ")[0]}
    if on_gpu:
        torch.cuda.synchronize()
        figures["step_peaks_bytes"] = peaks
        figures["peak_bytes"] = max([*peaks, torch.cuda.max_memory_allocated()])
        figures["gpu"] = torch.cuda.get_device_name()
        if options.record and rank == 0:
            torch.cuda.memory._dump_snapshot(str(options.record))
    if rank == 0:
        options.result.write_text(json.dumps(figures) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
