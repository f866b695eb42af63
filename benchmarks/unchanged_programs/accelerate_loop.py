"""accelerate's loop over a data set of lines: padding to the longest, accumulation, clipping, evaluation, saving."""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

p = argparse.ArgumentParser()
p.add_argument("model")
p.add_argument("data", type=Path)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--accumulation", type=int, default=2)
p.add_argument("--max-length", type=int, default=1024)
p.add_argument("--rows", type=int, default=48)
args = p.parse_args()
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=args.accumulation)
set_seed(7)
tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
model.gradient_checkpointing_enable()


def rows(split: str) -> list[dict[str, list[int]]]:
    lines = (args.data / f"{split}.jsonl").read_text().splitlines()[: args.rows]
    return [
        tokenizer(json.loads(line)["text"], truncation=True, max_length=args.max_length, return_token_type_ids=False)
        for line in lines
    ]


def collate(items):
    batch = tokenizer.pad(items, return_tensors="pt")
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


train = DataLoader(rows("train"), batch_size=args.batch, shuffle=True, collate_fn=collate)
held = DataLoader(rows("test"), batch_size=2 * args.batch, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
schedule = get_linear_schedule_with_warmup(optimizer, 2, len(train))
model, optimizer, train, held, schedule = accelerator.prepare(model, optimizer, train, held, schedule)
model.train()
for number, batch in enumerate(train):
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        accelerator.print(number, loss.item())
model.eval()
losses = []
for batch in held:
    with torch.no_grad():
        loss = model(**batch).loss
    losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
accelerator.print("held", torch.cat(losses).mean().item())
with tempfile.TemporaryDirectory() as folder:
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(folder, save_function=accelerator.save)
