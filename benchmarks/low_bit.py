"""Measure steps with 4-bit and 8-bit weights, 8-bit moments, GaLore and experts, and score them as accuracy.py does.

    python benchmarks/low_bit.py measure RESULTS.jsonl   # on a GPU, with bitsandbytes and galore-torch
    python benchmarks/low_bit.py score RESULTS.jsonl     # anywhere

The recipes are chosen, not drawn: one of these determines the peak of each.
"""

from typing import Any

from accuracy import measure_or_score

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
}
BIASED = {**SMALL, "model_type": "qwen2"}
LLAMA = {"model": "llama3.2-1b", "batch": 4, "seq": 1024}
QWEN = {"model": "qwen2.5-0.5b", "batch": 4, "seq": 1024}
INT8 = {"lora": 16, "quantization": "8bit"}
EXPERTS = {**SMALL, "model_type": "mixtral", "num_local_experts": 4}
SHORT = {"batch": 1, "seq": 64}
RECIPES: tuple[dict[str, Any], ...] = (
    {"model": "llama3.2-1b", "batch": 4, "seq": 1024, "precision": "bf16", "optimizer": "adamw-8bit"},
    {"model": "llama3.2-1b", "batch": 2, "seq": 512, "precision": "amp", "optimizer": "adamw-8bit"},
    {"model": SMALL, **SHORT, "precision": "amp", "optimizer": "adamw-8bit"},
    {"model": "llama3.2-1b", "batch": 4, "seq": 1024, "precision": "amp", "qlora": 16},
    {"model": "llama3.2-1b", "batch": 2, "seq": 1024, "precision": "bf16", "qlora": 16, "checkpointing": False},
    {"model": "llama3.2-1b", "batch": 4, "seq": 1024, "precision": "bf16", "qlora": 8, "liger": "all"},
    {"model": "llama3.2-1b", "batch": 1, "seq": 256, "precision": "bf16", "qlora": 8, "checkpointing": False},
    {"model": BIASED, "batch": 4, "seq": 1024, "precision": "bf16", "qlora": 8, "checkpointing": False},
    {"model": SMALL, "batch": 4, "seq": 512, "precision": "amp-fp16", "qlora": 4, "attention": "eager"},
    {"model": SMALL, "batch": 4, "seq": 1024, "precision": "amp", "optimizer": "galore", "galore_rank": 64},
    {"model": SMALL, **SHORT, "precision": "bf16", "optimizer": "galore", "galore_rank": 64},
    {"model": SMALL, **SHORT, "precision": "fp32", "optimizer": "galore", "galore_rank": 128},
    {"model": EXPERTS, "batch": 4, "seq": 1024, "precision": "amp"},
    {"model": EXPERTS, "batch": 4, "seq": 1024, "precision": "fp16", "checkpointing": False},
    # the same training over weights in 16, 8 and 4 bits
    {**LLAMA, "precision": "bf16-amp", "lora": 16},
    {**LLAMA, "precision": "bf16-amp", **INT8},
    {**LLAMA, "precision": "bf16-amp", "qlora": 16},
    {**LLAMA, "precision": "bf16-amp", **INT8, "reentrant": True},
    {**LLAMA, "precision": "bf16", **INT8, "checkpointing": False},
    {**LLAMA, "precision": "amp", **INT8, "grad_accum": 2},
    {**LLAMA, "precision": "fp16-amp", **INT8, "optimizer": "adamw-8bit"},
    {**QWEN, "precision": "bf16-amp", **INT8, "lora_targets": "q_proj+v_proj"},
    {**QWEN, "precision": "bf16-amp", **INT8, "liger": "all", "adapter_dtype": "bfloat16"},
    {"model": BIASED, **SHORT, "precision": "bf16-amp", **INT8, "checkpointing": False},
    {**QWEN, "precision": "bf16", "optimizer": "paged-adamw-8bit"},
    {**QWEN, "precision": "amp", "optimizer": "paged-adamw"},
)


if __name__ == "__main__":
    measure_or_score(RECIPES, at_once=10, description=__doc__)
