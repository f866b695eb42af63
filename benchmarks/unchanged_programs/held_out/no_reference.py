"""Preferences without a reference model by TRL's experimental trainers: ORPO, or CPO with SimPO's loss."""

import argparse
import tempfile

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

p = argparse.ArgumentParser()
p.add_argument("model")
p.add_argument("data")
p.add_argument("--method", choices=["orpo", "simpo"], default="orpo")
p.add_argument("--batch", type=int, default=4)
args = p.parse_args()
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained(args.model)
data = load_dataset(args.data, split="train")
with tempfile.TemporaryDirectory() as folder:
    common = {
        "output_dir": folder,
        "max_steps": 3,
        "per_device_train_batch_size": args.batch,
        "gradient_checkpointing": args.method == "simpo",
        "bf16": torch.cuda.is_available(),
        "max_length": 1024,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
    if args.method == "orpo":
        trainer = ORPOTrainer(model, ORPOConfig(**common), train_dataset=data, processing_class=tokenizer)
    else:
        options = CPOConfig(**common, loss_type="simpo", cpo_alpha=0.0, gradient_accumulation_steps=2)
        trainer = CPOTrainer(model, options, train_dataset=data, processing_class=tokenizer)
    trainer.train()
