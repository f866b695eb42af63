"""Trainer fine-tunes a DeBERTa that tags words in float16, with checkpointing, a metric and saved checkpoints."""

import argparse
import random
import tempfile

import torch
from transformers import (
    AutoTokenizer,
    DataCollatorForTokenClassification,
    DebertaV2Config,
    DebertaV2ForTokenClassification,
    Trainer,
    TrainingArguments,
)

p = argparse.ArgumentParser()
p.add_argument("tokenizer")
p.add_argument("--layers", type=int, default=12)
p.add_argument("--width", type=int, default=768)
p.add_argument("--batch", type=int, default=16)
p.add_argument("--seq", type=int, default=384)
args = p.parse_args()
draw = random.Random(6)


def rows(count: int) -> list[dict]:
    lengths = [draw.randint(args.seq // 8, args.seq) for _ in range(count)]
    return [
        {"input_ids": [draw.randrange(4, 400) for _ in range(n)], "labels": [draw.randrange(9) for _ in range(n)]}
        for n in lengths
    ]


def metrics(result) -> dict[str, float]:
    known = result.label_ids != -100
    return {"accuracy": float((result.predictions.argmax(-1) == result.label_ids)[known].mean())}


torch.manual_seed(0)
config = DebertaV2Config(
    vocab_size=49152,
    hidden_size=args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 64,
    intermediate_size=4 * args.width,
    relative_attention=True,
    position_buckets=256,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    pos_att_type=["p2c", "c2p"],
    type_vocab_size=0,
    num_labels=9,
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=1,
        per_device_train_batch_size=args.batch,
        learning_rate=2e-5,
        fp16=torch.cuda.is_available(),
        gradient_checkpointing=True,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=1,
        report_to=[],
    )
    trainer = Trainer(
        DebertaV2ForTokenClassification(config),
        arguments,
        data_collator=DataCollatorForTokenClassification(AutoTokenizer.from_pretrained(args.tokenizer)),
        train_dataset=rows(5 * args.batch),
        eval_dataset=rows(2 * args.batch),
        compute_metrics=metrics,
    )
    trainer.train()
    print(trainer.predict(rows(args.batch)).metrics)
