"""Seq2SeqTrainer fine-tunes a Whisper on synthetic spectrograms: float16, checkpointing, a frozen encoder front."""

import argparse
import random
import tempfile

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, WhisperConfig, WhisperForConditionalGeneration

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=12)
p.add_argument("--width", type=int, default=768)
p.add_argument("--batch", type=int, default=8)
p.add_argument("--frames", type=int, default=3000)
p.add_argument("--words", type=int, default=200)
args = p.parse_args()
draw = random.Random(9)


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    features = torch.stack([torch.randn(80, args.frames) for _ in rows])
    labels = torch.full((len(rows), max(row["words"] for row in rows)), -100)
    for i, row in enumerate(rows):
        labels[i, : row["words"]] = torch.randint(100, 50000, (row["words"],))
    return {"input_features": features, "labels": labels}


torch.manual_seed(0)
config = WhisperConfig(
    d_model=args.width,
    encoder_layers=args.layers,
    decoder_layers=args.layers,
    encoder_attention_heads=args.width // 64,
    decoder_attention_heads=args.width // 64,
    encoder_ffn_dim=4 * args.width,
    decoder_ffn_dim=4 * args.width,
    max_source_positions=args.frames // 2,
    apply_spec_augment=True,
)
model = WhisperForConditionalGeneration(config)
model.config.use_cache = False
model.model.encoder.conv1.requires_grad_(requires_grad=False)
with tempfile.TemporaryDirectory() as folder:
    arguments = Seq2SeqTrainingArguments(
        output_dir=folder,
        max_steps=4,
        per_device_train_batch_size=args.batch,
        learning_rate=1e-5,
        warmup_steps=2,
        fp16=torch.cuda.is_available(),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        save_strategy="no",
        logging_steps=1,
        remove_unused_columns=False,
        report_to=[],
    )
    data = [{"words": draw.randint(args.words // 5, args.words)} for _ in range(8 * args.batch)]
    Seq2SeqTrainer(model, arguments, train_dataset=data, data_collator=collate).train()
