"""Trainer fine-tunes a BERT classifier in float16: rows of many lengths, grouped and padded, metrics from logits."""

import argparse
import random
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=12)
p.add_argument("--width", type=int, default=768)
p.add_argument("--batch", type=int, default=32)
p.add_argument("--seq", type=int, default=384)
args = p.parse_args()
draw = random.Random(5)


def rows(count: int) -> list[dict]:
    made = []
    for _ in range(count):
        n = draw.randint(args.seq // 8, args.seq)
        made.append({"input_ids": [draw.randrange(1000, 30000) for _ in range(n)], "label": draw.randrange(4)})
    return made


def collate(items: list[dict]) -> dict[str, torch.Tensor]:
    longest = -(-max(len(item["input_ids"]) for item in items) // 8) * 8
    tokens = torch.zeros(len(items), longest, dtype=torch.long)
    for i, item in enumerate(items):
        tokens[i, : len(item["input_ids"])] = torch.tensor(item["input_ids"])
    labels = torch.tensor([item["label"] for item in items])
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


def metrics(result) -> dict[str, float]:
    return {"accuracy": float((result.predictions.argmax(-1) == result.label_ids).mean())}


torch.manual_seed(0)
config = BertConfig(
    num_hidden_layers=args.layers,
    hidden_size=args.width,
    num_attention_heads=args.width // 64,
    intermediate_size=4 * args.width,
    num_labels=4,
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=1,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=2 * args.batch,
        learning_rate=3e-5,
        warmup_steps=2,
        label_smoothing_factor=0.1,
        fp16=torch.cuda.is_available(),
        optim="adamw_torch_fused",
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=2,
        report_to=[],
        remove_unused_columns=False,
    )
    model = BertForSequenceClassification(config)
    Trainer(
        model,
        arguments,
        data_collator=collate,
        train_dataset=rows(6 * args.batch),
        eval_dataset=rows(3 * args.batch),
        compute_metrics=metrics,
    ).train()
