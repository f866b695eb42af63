"""Trainer with 4.5 GiB: forward and backward fit, the first step of AdamW does not, and nothing catches it."""

import tempfile

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
config = Qwen3Config(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=20,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
    tie_word_embeddings=True,
)
if torch.cuda.is_available():
    torch.cuda.set_per_process_memory_fraction(4.5 * 2**30 / torch.cuda.mem_get_info()[1])
tokens = torch.randint(4, 32000, (16, 512))
rows = [{"input_ids": row, "labels": row} for row in tokens]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=1,
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
    )
    Trainer(Qwen3ForCausalLM(config), arguments, train_dataset=rows).train()
