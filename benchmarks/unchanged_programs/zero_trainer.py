"""transformers' Trainer under DeepSpeed's ZeRO-2 on one GPU, with the optimizer in main memory."""

import argparse
import os
import tempfile

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

p = argparse.ArgumentParser()
p.add_argument("model")
p.add_argument("--stage", type=int, default=2)
p.add_argument("--no-offload", action="store_true")
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=512)
args = p.parse_args()
for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
torch.manual_seed(0)
zero = {"stage": args.stage}
if not args.no_offload:
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
settings = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": True},
    "zero_optimization": zero,
    "zero_force_ds_cpu_optimizer": False,
}
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=1e-5,
        bf16=True,
        deepspeed=settings,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
    )
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    tokens = torch.randint(4, 400, (8 * args.batch, args.seq))
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in tokens]
    Trainer(model, arguments, train_dataset=rows).train()
