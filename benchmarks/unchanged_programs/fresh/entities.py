"""Token classification with transformers' Trainer: rows of any length, a metric, the best model at the end."""

import argparse
import random
import tempfile

import numpy as np
import torch
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=8)
p.add_argument("--width", type=int, default=512)
p.add_argument("--longest", type=int, default=256)
p.add_argument("--batch", type=int, default=16)
args = p.parse_args()
random.seed(0)
torch.manual_seed(0)


def row():
    length = random.randint(args.longest // 4, args.longest)
    return {
        "input_ids": [random.randrange(5, 20000) for _ in range(length)],
        "labels": [random.choice([-100, 0, 0, 1, 2, 3, 4]) for _ in range(length)],
    }


def collate(rows):
    longest = max(len(each["labels"]) for each in rows)
    longest += -longest % 8

    def padded(key, fill):
        return torch.tensor([each[key] + [fill] * (longest - len(each[key])) for each in rows])

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": padded("labels", -100)}


def metrics(prediction):
    found, labels = np.argmax(prediction.predictions, axis=-1), prediction.label_ids
    kept = labels != -100
    return {"accuracy": float((found[kept] == labels[kept]).mean())}


config = BertConfig(
    vocab_size=20000,
    hidden_size=args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 64,
    intermediate_size=4 * args.width,
    num_labels=5,
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=6,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=2 * args.batch,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        weight_decay=0.01,
        report_to=[],
    )
    Trainer(
        BertForTokenClassification(config),
        arguments,
        data_collator=collate,
        train_dataset=[row() for _ in range(8 * args.batch)],
        eval_dataset=[row() for _ in range(5 * args.batch)],
        compute_metrics=metrics,
    ).train()
