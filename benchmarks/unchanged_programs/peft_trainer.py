"""Trainer with an adapter other than LoRA: IA3, prompt tuning, prefix tuning, or a LoRA that trains embeddings, too."""

import argparse
import tempfile

import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

p = argparse.ArgumentParser()
p.add_argument("model")
p.add_argument("--method", choices=["ia3", "prompt", "prefix", "lora-embeddings"], default="ia3")
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=512)
args = p.parse_args()
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
task = {"task_type": "CAUSAL_LM"}
adapter = {
    "ia3": lambda: IA3Config(
        **task, target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "prompt": lambda: PromptTuningConfig(**task, num_virtual_tokens=20),
    "prefix": lambda: PrefixTuningConfig(
        **task, num_virtual_tokens=30, prefix_projection=True, encoder_hidden_size=512
    ),
    "lora-embeddings": lambda: LoraConfig(
        **task, r=8, target_modules=["q_proj", "v_proj"], modules_to_save=["embed_tokens"], lora_dropout=0.05
    ),
}[args.method]()
model = get_peft_model(model, adapter)
model.print_trainable_parameters()
tokens = torch.randint(4, 400, (8 * args.batch, args.seq))
rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in tokens]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=args.batch,
        learning_rate=1e-3,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
    )
    Trainer(model, arguments, train_dataset=rows).train()
