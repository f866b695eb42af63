"""Files as users of the frameworks write them, outside of the frameworks' own examples: what each means."""

from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import UnsupportedError
from ligerprof.recipe.configs.resolve import load_recipe
from tests.recipe.configs.texts import write

TRL_QLORA = """\
# trl sft --config sft.yaml
model_name_or_path: mistralai/Mistral-7B-v0.1
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
load_in_4bit: true
use_peft: true
lora_r: 16
lora_alpha: 16
lora_target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]
dataset_mixture:
  datasets:
    - id: HuggingFaceH4/ultrachat_200k
      weight: 1.0
bf16: true
eval_strategy: epoch
gradient_accumulation_steps: 2
gradient_checkpointing_kwargs:
  use_reentrant: false
max_seq_length: 2048
per_device_eval_batch_size: 8
per_device_train_batch_size: 4
"""
TRL_LIGER = """\
model_name_or_path: HuggingFaceTB/SmolLM3-3B-Base
attn_implementation: flash_attention_2
dtype: bfloat16
packing: true
max_length: 32768
per_device_train_batch_size: 1
gradient_checkpointing_kwargs: {use_reentrant: true}
max_grad_norm: 0.2
use_liger_kernel: true
dataset_name: HuggingFaceTB/smoltalk2
"""
TRL_PAGED = """\
model_name_or_path: Qwen/Qwen2.5-Coder-32B-Instruct
torch_dtype: bfloat16
dataset_name: open-r1/codeforces-cots
bf16: true
gradient_checkpointing: true
max_length: 22528
optim: paged_adamw_8bit
per_device_train_batch_size: 1
packing: false
accelerate_config: zero3
num_processes: 16
"""
AXOLOTL_PACKED = """\
base_model: meta-llama/Meta-Llama-3-8B
load_in_8bit: false
strict: false
datasets:
  - path: Magpie-Align/Magpie-Pro-300K-Filtered
    type: sharegpt
val_set_size: 0.001
sequence_len: 8192
sample_packing: true
eval_sample_packing: false
pad_to_sequence_len: true
gradient_accumulation_steps: 32
micro_batch_size: 1
optimizer: paged_adamw_8bit
bf16: auto
fp16:
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
flash_attention: true
deepspeed:
fsdp:
"""
AXOLOTL_8BIT = """\
base_model: NousResearch/Meta-Llama-3-8B
sequence_len: 4096
load_in_8bit: true
flash_attention: true
adapter: lora
lora_r: 16
lora_target_linear: true
lora_modules_to_save: [embed_tokens, lm_head]
datasets: []
val_set_size: 0.05
optimizer: adamw_bnb_8bit
micro_batch_size: 32
bf16: auto
gradient_checkpointing: true
"""
AXOLOTL_ZERO = """\
base_model: codellama/CodeLlama-7b-hf
datasets: []
sequence_len: 4096
sample_packing: false
micro_batch_size: 4
gradient_accumulation_steps: 1
optimizer: adamw_torch
bf16: true
flash_attention: true
gradient_checkpointing: true
deepspeed: /workspace/axolotl/deepspeed_configs/zero3_bf16.json
"""
FACTORY_FULL = """\
### model
model_name_or_path: Qwen/Qwen2.5-7B-Instruct

### method
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_offload_config.json

### dataset
dataset: open-thoughts/OpenThoughts-114k
template: qwen25
cutoff_len: 16384

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 3
bf16: true
"""
TRAINER_FSDP = """\
model_name_or_path: Qwen/Qwen2.5-3B
output_dir: ckpts/s1
per_device_train_batch_size: 1
block_size: 8192
bf16: true
dtype: float32
fsdp: full_shard auto_wrap
fsdp_config: {transformer_layer_cls_to_wrap: [Qwen2DecoderLayer], activation_checkpointing: true}
"""
OPEN_INSTRUCT = """\
model_name_or_path: meta-llama/Llama-2-7b-hf
use_flash_attn: true
use_qlora: true
use_lora: true
lora_rank: 64
tokenizer_name: meta-llama/Llama-2-7b-hf
use_slow_tokenizer: true
dataset_name: allenai/tulu-v2-sft-mixture
max_seq_length: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 16
gradient_checkpointing: true
with_tracking: true
checkpointing_steps: epoch
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""

MEANINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "trl-qlora": (
        TRL_QLORA,
        {
            "batch": 4,
            "seq": 2048,
            "grad_accum": 2,
            "qlora": 16,
            "lora_targets": "all-linear",
            "eval_batch": 8,
            "precision": "bf16-amp",
            "checkpointing": True,
            "reentrant": False,
            "attention": "flash",
            "adapter_dtype": "bfloat16",
            "nested_quant": False,
            "optimizer": "adamw-fused",
            "clip": 1.0,
        },
    ),
    "trl-liger": (
        TRL_LIGER,
        {
            "batch": 1,
            "seq": 32768,
            "packing": True,
            "precision": "bf16-amp",
            "clip": 0.2,
            "loss": "trl-tiled",
            "checkpointing": True,
            "reentrant": True,
            "attention": "flash",
            "eval_batch": None,
        },
    ),
    "trl-paged": (
        TRL_PAGED,
        {
            "engine": "deepspeed",
            "zero": 3,
            "gpus": 16,
            "precision": "mixed",
            "optimizer": "paged-adamw-8bit",
            "packing": False,
            "seq": 22528,
            "checkpointing": True,
            "reentrant": False,
        },
    ),
    "axolotl-packed": (
        AXOLOTL_PACKED,
        {
            "batch": 1,
            "seq": 8192,
            "grad_accum": 32,
            "packing": True,
            "optimizer": "paged-adamw-8bit",
            "precision": "bf16-amp",
            "reentrant": False,
            "eval_batch": 1,
            "engine": "torch",
            "lora": None,
        },
    ),
    "axolotl-8bit": (
        AXOLOTL_8BIT,
        {
            "batch": 32,
            "lora": 16,
            "quantization": "8bit",
            "modules_to_save": "embed_tokens+lm_head",
            "checkpointing": True,
            "reentrant": True,
            "optimizer": "adamw-8bit",
            "eval_batch": 32,
        },
    ),
    "axolotl-zero": (
        AXOLOTL_ZERO,
        {"batch": 4, "engine": "deepspeed", "zero": 3, "offload": "none", "precision": "mixed", "reentrant": True},
    ),
    "factory-full": (
        FACTORY_FULL,
        {
            "batch": 1,
            "seq": 16384,
            "grad_accum": 3,
            "engine": "deepspeed",
            "zero": 3,
            "offload": "all",
            "precision": "mixed",
            "checkpointing": True,
            "reentrant": True,
            "packing": False,
            "lora": None,
        },
    ),
    "trainer-fsdp": (
        TRAINER_FSDP,
        {
            "batch": 1,
            "seq": 8192,
            "engine": "fsdp2",
            "precision": "mixed",
            "wrap": "accelerate",
            "checkpointing": True,
            "reentrant": False,
            "reduce_dtype": "bfloat16",
            "clip": 1.0,
        },
    ),
    "open-instruct": (
        OPEN_INSTRUCT,
        {
            "batch": 1,
            "seq": 4096,
            "grad_accum": 16,
            "qlora": 64,
            "precision": "bf16",
            "optimizer": "paged-adamw",
            "checkpointing": True,
            "reentrant": False,
            "attention": "flash",
            "clip": 0,
        },
    ),
    "accelerate": (
        ACCELERATE,
        {
            "engine": "deepspeed",
            "zero": 2,
            "offload": "optimizer",
            "gpus": 4,
            "grad_accum": 4,
            "clip": 1.0,
            "precision": "mixed",
            "optimizer": "deepspeed-cpu-adam",
        },
    ),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_what_a_users_file_means(name: str, tmp_path: Path) -> None:
    text, means = MEANINGS[name]
    recipe, report = load_recipe([write(tmp_path, "config.yaml", text)], {})
    assert {option: getattr(recipe, option) for option in means} == means
    assert report.unknown == ()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ("beta: 0.05\nmax_prompt_length: 512\nmax_completion_length: 512\n", "preference method"),
        ("beta: 2.5\ngamma_beta_ratio: 0.55\nmax_prompt_length: 1800\n", "preference method"),
        ("num_generations: 16\nuse_vllm: true\nmax_completion_length: 2048\n", "reinforcement learning"),
        ("center_rewards_coefficient: 0.01\n", "reward modeling"),
    ],
    ids=["orpo", "simpo", "grpo", "reward"],
)
def test_other_methods_of_trl_are_refused_by_name(keys: str, says: str, tmp_path: Path) -> None:
    text = f"model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct\nper_device_train_batch_size: 2\noutput_dir: out\n{keys}"
    with pytest.raises(UnsupportedError, match=f"{says}.* is not supported yet"):
        load_recipe([write(tmp_path, "config.yaml", text)], {})


@pytest.mark.parametrize(
    ("keys", "left_out"),
    [
        ("adapter: lora\n", True),
        ("adapter: qlora\nload_in_4bit: true\n", True),
        ("adapter: lora\nlora_mlp_kernel: false\n", False),
        ("adapter: lora\nload_in_8bit: true\n", False),
        ("adapter: lora\ntrust_remote_code: true\n", False),
        ("", False),
    ],
    ids=["lora", "qlora", "off", "8-bit", "remote-code", "full"],
)
def test_lora_kernels_that_axolotl_switches_on_by_itself_are_left_out(
    keys: str, left_out: bool, tmp_path: Path
) -> None:
    text = f"base_model: meta-llama/Llama-3.2-1B\nmicro_batch_size: 1\nsequence_len: 512\nlora_r: 8\n{keys}"
    _, report = load_recipe([write(tmp_path, "config.yaml", text)], {})
    assert any("fused LoRA kernels" in what for what in report.left_out.values()) == left_out
