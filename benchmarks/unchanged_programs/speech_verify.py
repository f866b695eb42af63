"""WavLM tells speakers apart with transformers' Trainer: clips of many lengths, bf16."""

import argparse
import tempfile

import torch
from transformers import Trainer, TrainingArguments, WavLMConfig, WavLMForXVector

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=6)
p.add_argument("--width", type=int, default=768)
p.add_argument("--batch", type=int, default=8)
p.add_argument("--samples", type=int, default=64_000)
args = p.parse_args()
torch.manual_seed(0)
config = WavLMConfig(
    hidden_size=args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 64,
    intermediate_size=4 * args.width,
    num_labels=50,
    layerdrop=0.0,
    mask_time_prob=0.0,
)
model = WavLMForXVector(config)
lengths = torch.randint(args.samples // 2, args.samples, (4 * args.batch,)).tolist()
rows = [{"sound": torch.randn(length), "labels": index % 50} for index, length in enumerate(lengths)]


def collate(batch):
    sound = torch.nn.utils.rnn.pad_sequence([row["sound"] for row in batch], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row["sound"])) for row in batch], batch_first=True)
    labels = torch.tensor([row["labels"] for row in batch])
    return {"input_values": sound, "attention_mask": mask.long(), "labels": labels}


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=args.batch,
        bf16=torch.cuda.is_available(),
        remove_unused_columns=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
    )
    Trainer(model, arguments, train_dataset=rows, data_collator=collate).train()
