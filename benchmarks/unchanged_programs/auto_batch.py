"""Trainer's auto_find_batch_size with 3 GiB: it starts again with a smaller batch until one fits."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
batch = 32
if torch.cuda.is_available():
    torch.cuda.set_per_process_memory_fraction(3 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
else:
    batch = 2
config = GPT2Config(n_layer=6, n_embd=512, n_head=8, vocab_size=20000, n_positions=256)
tokens = torch.randint(20000, (4 * batch, 256))
rows = [{"input_ids": row, "labels": row} for row in tokens]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=4,
        per_device_train_batch_size=batch,
        auto_find_batch_size=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows)
    trainer.train()
    print("batch", trainer._train_batch_size)
