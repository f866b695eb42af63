"""Seq2SeqTrainer fine-tunes a BART: padded batches, label smoothing, beams generated in the evaluation."""

import argparse
import random
import tempfile

import torch
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

p = argparse.ArgumentParser()
p.add_argument("tokenizer")
p.add_argument("--layers", type=int, default=8)
p.add_argument("--width", type=int, default=1024)
p.add_argument("--batch", type=int, default=8)
p.add_argument("--source", type=int, default=768)
p.add_argument("--target", type=int, default=128)
args = p.parse_args()
draw = random.Random(8)


def words(low: int, high: int) -> list[int]:
    return [draw.randrange(4, 400) for _ in range(draw.randint(low, high))] + [2]


def rows(count: int) -> list[dict]:
    return [
        {"input_ids": words(args.source // 4, args.source), "labels": words(args.target // 4, args.target)}
        for _ in range(count)
    ]


torch.manual_seed(0)
config = BartConfig(
    vocab_size=49152,
    d_model=args.width,
    encoder_layers=args.layers,
    decoder_layers=args.layers,
    encoder_attention_heads=args.width // 64,
    decoder_attention_heads=args.width // 64,
    encoder_ffn_dim=4 * args.width,
    decoder_ffn_dim=4 * args.width,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=2,
    forced_eos_token_id=2,
)
model = BartForConditionalGeneration(config)
model.generation_config.update(max_length=min(args.target, 48), num_beams=3)
with tempfile.TemporaryDirectory() as folder:
    arguments = Seq2SeqTrainingArguments(
        output_dir=folder,
        max_steps=4,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        gradient_accumulation_steps=2,
        learning_rate=5e-5,
        label_smoothing_factor=0.1,
        bf16=torch.cuda.is_available(),
        eval_strategy="steps",
        eval_steps=4,
        predict_with_generate=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
    )
    Seq2SeqTrainer(
        model,
        arguments,
        data_collator=DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(args.tokenizer), model=model),
        train_dataset=rows(8 * args.batch),
        eval_dataset=rows(2 * args.batch),
        compute_metrics=lambda result: {"length": float((result.predictions > 2).sum(-1).mean())},
    ).train()
