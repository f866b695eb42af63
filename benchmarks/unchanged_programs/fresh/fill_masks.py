"""Masked language model with transformers' Trainer: a collator masks tokens, fp16, accumulation."""

import argparse
import tempfile

import torch
from transformers import RobertaConfig, RobertaForMaskedLM, Trainer, TrainingArguments

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=6)
p.add_argument("--width", type=int, default=768)
p.add_argument("--seq", type=int, default=384)
p.add_argument("--batch", type=int, default=12)
args = p.parse_args()
torch.manual_seed(0)


def collate(rows):
    ids = torch.stack(rows)
    labels = ids.clone()
    chosen = torch.rand(ids.shape) < 0.15
    labels[~chosen] = -100
    replaced = chosen & (torch.rand(ids.shape) < 0.8)
    ids[replaced] = 4
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


config = RobertaConfig(
    vocab_size=50265,
    hidden_size=args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 64,
    intermediate_size=4 * args.width,
    max_position_embeddings=args.seq + 2,
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=2,
        fp16=torch.cuda.is_available(),
        warmup_steps=1,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        remove_unused_columns=False,
    )
    rows = list(torch.randint(10, 50000, (64 * args.batch, args.seq)))
    Trainer(RobertaForMaskedLM(config), arguments, data_collator=collate, train_dataset=rows).train()
