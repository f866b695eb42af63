"""Seq2SeqTrainer with a gated T5 and Adafactor; the evaluation generates."""

import argparse
import tempfile

import torch
from transformers import (
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=8)
p.add_argument("--width", type=int, default=512)
p.add_argument("--batch", type=int, default=16)
p.add_argument("--source", type=int, default=384)
p.add_argument("--target", type=int, default=96)
args = p.parse_args()
torch.manual_seed(0)
config = T5Config(
    d_model=args.width,
    d_kv=64,
    d_ff=args.width * 2,
    num_layers=args.layers,
    num_heads=args.width // 64,
    vocab_size=32128,
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
    decoder_start_token_id=0,
)
model = T5ForConditionalGeneration(config)
model.generation_config = GenerationConfig(
    decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, min_new_tokens=32, max_new_tokens=32
)
source = torch.randint(2, 32000, (5 * args.batch, args.source))
rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[: args.target]} for row in source]
with tempfile.TemporaryDirectory() as folder:
    arguments = Seq2SeqTrainingArguments(
        output_dir=folder,
        max_steps=4,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        optim="adafactor",
        learning_rate=1e-3,
        bf16=torch.cuda.is_available(),
        eval_strategy="steps",
        eval_steps=2,
        predict_with_generate=True,
        save_strategy="no",
        report_to=[],
    )
    Seq2SeqTrainer(model, arguments, train_dataset=rows, eval_dataset=rows[: 2 * args.batch]).train()
