"""Generalized knowledge distillation by TRL: a student answers some prompts itself, a larger teacher gives the odds."""

import argparse
import tempfile

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer

p = argparse.ArgumentParser()
p.add_argument("student")
p.add_argument("teacher")
p.add_argument("data")
p.add_argument("--batch", type=int, default=4)
args = p.parse_args()
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    options = GKDConfig(
        output_dir=folder,
        max_steps=4,
        per_device_train_batch_size=args.batch,
        lmbda=0.5,
        max_new_tokens=48,
        max_length=768,
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=3,
    )
    GKDTrainer(
        AutoModelForCausalLM.from_pretrained(args.student, dtype=torch.bfloat16),
        AutoModelForCausalLM.from_pretrained(args.teacher, dtype=torch.bfloat16),
        args=options,
        train_dataset=load_dataset(args.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(args.student),
    ).train()
