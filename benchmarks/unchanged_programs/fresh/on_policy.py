"""TRL's generalized knowledge distillation: the student generates, and the teacher's distribution is the target."""

import argparse
import tempfile

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer

p = argparse.ArgumentParser()
p.add_argument("model")
p.add_argument("data")
p.add_argument("--batch", type=int, default=2)
p.add_argument("--new", type=int, default=32)
args = p.parse_args()
torch.manual_seed(0)
models = [AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16) for _ in range(2)]
with tempfile.TemporaryDirectory() as folder:
    options = GKDConfig(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=args.batch,
        max_length=512,
        max_new_tokens=args.new,
        lmbda=0.7,
        beta=0.5,
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=1,
    )
    GKDTrainer(
        models[0],
        teacher_model=models[1],
        args=options,
        train_dataset=load_dataset(args.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
    ).train()
