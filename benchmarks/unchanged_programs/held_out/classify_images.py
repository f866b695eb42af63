"""Trainer fine-tunes a ViT on images of a lazy data set: TF32, workers, half of it frozen, metrics."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=24)
p.add_argument("--width", type=int, default=1024)
p.add_argument("--batch", type=int, default=32)
p.add_argument("--size", type=int, default=224)
args = p.parse_args()


class Images(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict:
        images = torch.rand(3, args.size, args.size, generator=torch.Generator().manual_seed(i))
        return {"pixel_values": images, "labels": i % 10}


torch.manual_seed(0)
config = ViTConfig(
    hidden_size=args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 64,
    intermediate_size=4 * args.width,
    image_size=args.size,
    num_labels=10,
    hidden_dropout_prob=0.1,
)
model = ViTForImageClassification(config)
for name, weight in model.named_parameters():
    parts = name.split(".")
    weight.requires_grad_(not any(part.isdigit() and int(part) < args.layers // 2 for part in parts))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=5,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=2 * args.batch,
        learning_rate=1e-4,
        tf32=True if torch.cuda.is_available() else None,
        optim="sgd",
        dataloader_num_workers=2,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
    )
    Trainer(
        model,
        arguments,
        train_dataset=Images(5 * args.batch),
        eval_dataset=Images(2 * args.batch),
        compute_metrics=lambda result: {"hit": float((result.predictions.argmax(-1) == result.label_ids).mean())},
    ).train()
