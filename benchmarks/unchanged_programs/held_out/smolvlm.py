"""Trainer fine-tunes an Idefics3 of random weights on questions about one or two images, the vision tower frozen."""

import argparse
import random
import tempfile

import torch
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Trainer, TrainingArguments

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=16)
p.add_argument("--width", type=int, default=960)
p.add_argument("--depth", type=int, default=12)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--size", type=int, default=364)
p.add_argument("--text", type=int, default=200)
args = p.parse_args()
IMAGE, VOCABULARY, PATCH, SHRINK = 4999, 5000, 14, 2
per_image = (args.size // PATCH // SHRINK) ** 2
draw = random.Random(1)


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    longest = max(len(row["tokens"]) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    pixels = torch.zeros(len(rows), 2, 3, args.size, args.size)
    for i, row in enumerate(rows):
        tokens[i, -len(row["tokens"]) :] = torch.tensor(row["tokens"])
        pixels[i, : row["images"]] = torch.rand(row["images"], 3, args.size, args.size) + 0.1
    labels = tokens.masked_fill((tokens == 0) | (tokens == IMAGE), -100)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "pixel_values": pixels, "labels": labels}


def row() -> dict:
    images, words = draw.randint(1, 2), draw.randint(args.text // 3, args.text)
    return {"images": images, "tokens": [IMAGE] * per_image * images + [draw.randrange(4, IMAGE) for _ in range(words)]}


torch.manual_seed(0)
config = Idefics3Config(
    text_config={
        "model_type": "llama",
        "hidden_size": args.width,
        "intermediate_size": 8 * args.width // 3,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.width // 64,
        "num_key_value_heads": max(args.width // 192, 1),
        "vocab_size": VOCABULARY,
        "pad_token_id": 0,
    },
    vision_config={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": args.depth,
        "num_attention_heads": 12,
        "image_size": args.size,
        "patch_size": PATCH,
    },
    image_token_id=IMAGE,
    scale_factor=SHRINK,
    pad_token_id=0,
)
model = Idefics3ForConditionalGeneration(config).to(torch.bfloat16)
model.model.vision_model.requires_grad_(requires_grad=False)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=4,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=2,
        learning_rate=1e-5,
        warmup_steps=1,
        bf16=torch.cuda.is_available(),
        optim="adamw_torch_fused",
        save_strategy="no",
        logging_steps=1,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
    )
    Trainer(model, arguments, train_dataset=[row() for _ in range(32)], data_collator=collate).train()
