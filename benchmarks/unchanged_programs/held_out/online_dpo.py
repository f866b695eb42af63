"""Online DPO by TRL: two completions are generated for each prompt, a function judges them, a copy is the reference."""

import argparse
import tempfile

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

p = argparse.ArgumentParser()
p.add_argument("model")
p.add_argument("data")
p.add_argument("--batch", type=int, default=16)
args = p.parse_args()
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    options = OnlineDPOConfig(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=args.batch,
        max_new_tokens=64,
        max_length=512,
        learning_rate=5e-7,
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    OnlineDPOTrainer(
        AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16),
        reward_funcs=lambda completions, **_: [float(len(set(c)) / (len(c) + 1)) for c in completions],
        args=options,
        train_dataset=load_dataset(args.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
    ).train()
