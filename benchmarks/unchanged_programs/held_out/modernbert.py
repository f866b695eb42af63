"""Trainer pre-trains a ModernBERT: masked words by the collator, rows grouped by length, evaluation by epoch."""

import argparse
import random
import tempfile

import torch
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Trainer,
    TrainingArguments,
)

p = argparse.ArgumentParser()
p.add_argument("tokenizer")
p.add_argument("--layers", type=int, default=16)
p.add_argument("--width", type=int, default=768)
p.add_argument("--batch", type=int, default=16)
p.add_argument("--seq", type=int, default=1024)
args = p.parse_args()
draw = random.Random(4)
tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
tokenizer.add_special_tokens({"mask_token": "<mask>"})


def rows(count: int) -> list[dict]:
    lengths = [draw.randint(args.seq // 6, args.seq) for _ in range(count)]
    return [{"input_ids": [draw.randrange(4, 400) for _ in range(n)], "attention_mask": [1] * n} for n in lengths]


torch.manual_seed(0)
config = ModernBertConfig(
    vocab_size=-(-len(tokenizer) // 64) * 64,
    hidden_size=args.width,
    intermediate_size=3 * args.width // 2,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    cls_token_id=1,
    sep_token_id=2,
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=1,
        per_device_train_batch_size=args.batch,
        learning_rate=5e-4,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": 2},
        warmup_steps=1,
        bf16=torch.cuda.is_available(),
        eval_strategy="epoch",
        prediction_loss_only=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
    )
    Trainer(
        ModernBertForMaskedLM(config),
        arguments,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, pad_to_multiple_of=8),
        train_dataset=rows(5 * args.batch),
        eval_dataset=rows(3 * args.batch),
    ).train()
