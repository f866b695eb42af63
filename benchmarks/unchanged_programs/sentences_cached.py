"""sentence-transformers with gradient caching and nested widths: a BERT of random weights, triplets."""

import argparse
import random
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=6)
p.add_argument("--width", type=int, default=384)
p.add_argument("--batch", type=int, default=128)
p.add_argument("--seq", type=int, default=128)
args = p.parse_args()
torch.manual_seed(0)
draw = random.Random(3)
words = [f"w{i}" for i in range(5000)]


def text() -> str:
    return " ".join(draw.choices(words, k=draw.randint(args.seq // 4, args.seq)))


with tempfile.TemporaryDirectory() as folder:
    model_folder = Path(folder) / "model"
    config = BertConfig(
        num_hidden_layers=args.layers,
        hidden_size=args.width,
        num_attention_heads=args.width // 32,
        intermediate_size=4 * args.width,
        vocab_size=5005,
    )
    BertModel(config).save_pretrained(model_folder)
    vocabulary = Path(folder) / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizerFast(str(vocabulary)).save_pretrained(model_folder)
    inner = Transformer(str(model_folder), max_seq_length=args.seq)
    model = SentenceTransformer(modules=[inner, Pooling(args.width)])
    names = ("anchor", "positive", "negative")
    rows = Dataset.from_dict({name: [text() for _ in range(2 * args.batch)] for name in names})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=args.batch,
        bf16=torch.cuda.is_available(),
        save_strategy="no",
        logging_steps=1,
        report_to=[],
    )
    cached = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=32)
    SentenceTransformerTrainer(model, arguments, train_dataset=rows, loss=cached).train()
