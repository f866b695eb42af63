"""The programs of `suggestion_programs.py` that transformers' Trainer runs."""

import sys
from typing import Any

import torch
from suggestion_models import STEPS, Samples, Setting, llama, program

LIGER_ONLY_LOSS = {
    "fused_linear_cross_entropy": True,
    "cross_entropy": False,
    "rope": False,
    "rms_norm": False,
    "swiglu": False,
}


def run_trainer(
    setting: Setting, model: Any, *, evaluates: bool = False, accumulate: int = 1, **arguments: Any
) -> None:
    """Transformers' Trainer, with the change as an argument.

    Args:
        evaluates: after each step, in batches four times as large.
        accumulate: micro-batches of a step.
    """
    # the Trainer imports these if they are installed, and needs neither
    missing: dict[str, Any] = {"datasets": None, "trl": None}
    sys.modules.update(missing)
    from transformers import Trainer, TrainingArguments

    half = setting.does("half-batch")
    changes: dict[str, dict[str, Any]] = {
        "checkpointing": {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        },
        "fused-optimizer": {"optim": "adamw_torch_fused"},
        "fused-loss": {"use_liger_kernel": True, "liger_kernel_config": LIGER_ONLY_LOSS},
        "half-batch": {"gradient_accumulation_steps": 2 * accumulate},
        "8-bit-optimizer": {"optim": "adamw_bnb_8bit"},
        "paged-optimizer": {"optim": "paged_adamw_32bit"},
        "eval-batch": {"per_device_eval_batch_size": 2 * setting.batch},
    }
    if evaluates:
        large: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": False}
        arguments = {**large, "per_device_eval_batch_size": 4 * setting.batch, **arguments}
    made = TrainingArguments(
        output_dir="/tmp/suggestions-trainer",
        max_steps=STEPS,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=setting.small,
        per_device_train_batch_size=setting.batch // 2 if half else setting.batch,
        **{"gradient_accumulation_steps": accumulate, **arguments, **changes.get(setting.change, {})},
    )
    evaluated = Samples(setting, 8 * setting.batch) if evaluates else None
    Trainer(model=model, args=made, train_dataset=Samples(setting), eval_dataset=evaluated).train()


@program
def trainer(setting: Setting) -> None:
    """fp32 weights, bf16 autocast, foreach AdamW."""
    run_trainer(setting, llama(setting, dtype=torch.float32, by_trainer=True), bf16=True, optim="adamw_torch")


@program
def trainer_checkpointed(setting: Setting) -> None:
    """bf16 weights, tied, fused AdamW, checkpointing."""
    run_trainer(setting, llama(setting, tied=True, by_trainer=True), gradient_checkpointing=True)


@program
def trainer_small_batch(setting: Setting) -> None:
    """fp32 weights, bf16 autocast and foreach AdamW with few tokens, so that the optimizer step has the peak."""
    setting.batch, setting.seq = 2, setting.seq // 4
    run_trainer(setting, llama(setting, dtype=torch.float32, by_trainer=True), bf16=True, optim="adamw_torch")


@program
def trainer_evaluating(setting: Setting) -> None:
    """bf16 weights, with evaluations in larger batches, which have the peak."""
    setting.batch //= 4
    run_trainer(setting, llama(setting, by_trainer=True), evaluates=True)


@program
def trainer_accumulating(setting: Setting) -> None:
    """fp32 weights, bf16 autocast, four micro-batches a step, a model with more and narrower layers."""
    setting.batch, setting.seq, setting.vocab = 4, setting.seq * 3 // 4, setting.vocab // 2
    model = llama(setting, dtype=torch.float32, by_trainer=True, hidden=768, intermediate=2048, layers=14, heads=12)
    run_trainer(setting, model, bf16=True, optim="adamw_torch_fused", accumulate=4)


@program
def trainer_bf16(setting: Setting) -> None:
    """bf16 weights under bf16 autocast, few tokens, a wider model."""
    setting.batch, setting.seq = 2, setting.seq // 4
    model = llama(setting, by_trainer=True, hidden=2048, intermediate=5504, layers=6, heads=16, kv_heads=16)
    run_trainer(setting, model, bf16=True, optim="adamw_torch")


@program
def trainer_autocast_checkpointed(setting: Setting) -> None:
    """fp32 weights, bf16 autocast, checkpointing."""
    setting.batch, setting.seq, setting.vocab = 6, setting.seq // 2, setting.vocab // 2
    model = llama(setting, dtype=torch.float32, by_trainer=True, hidden=1536, intermediate=4096, layers=10, heads=12)
    run_trainer(setting, model, bf16=True, gradient_checkpointing=True)
