"""Seq2SeqTrainer with a small BART: evaluation generates with beams."""

import argparse
import tempfile

import torch
from transformers import BartConfig, BartForConditionalGeneration, Seq2SeqTrainer, Seq2SeqTrainingArguments

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=4)
p.add_argument("--width", type=int, default=512)
p.add_argument("--source", type=int, default=384)
p.add_argument("--target", type=int, default=48)
p.add_argument("--batch", type=int, default=8)
args = p.parse_args()
torch.manual_seed(0)
config = BartConfig(
    vocab_size=32000,
    d_model=args.width,
    encoder_layers=args.layers,
    decoder_layers=args.layers,
    encoder_attention_heads=args.width // 64,
    decoder_attention_heads=args.width // 64,
    encoder_ffn_dim=4 * args.width,
    decoder_ffn_dim=4 * args.width,
    max_position_embeddings=args.source,
    forced_eos_token_id=2,
)


def rows(count):
    return [
        {
            "input_ids": torch.randint(10, 32000, (args.source,)),
            "attention_mask": torch.ones(args.source, dtype=torch.long),
            "labels": torch.randint(10, 32000, (args.target,)),
        }
        for _ in range(count)
    ]


with tempfile.TemporaryDirectory() as folder:
    arguments = Seq2SeqTrainingArguments(
        output_dir=folder,
        max_steps=4,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        predict_with_generate=True,
        generation_max_length=24,
        generation_num_beams=2,
        eval_strategy="steps",
        eval_steps=2,
        bf16=torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
    )
    Seq2SeqTrainer(
        BartForConditionalGeneration(config),
        arguments,
        train_dataset=rows(8 * args.batch),
        eval_dataset=rows(2 * args.batch),
    ).train()
