"""Trainer over weights that bitsandbytes packs: 4-bit (NF4 with nested scales, or FP4) or LLM.int8, with LoRA."""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

p = argparse.ArgumentParser()
p.add_argument("model")
p.add_argument("--weights", choices=["nf4-nested", "nf4", "fp4", "int8"], default="nf4-nested")
p.add_argument("--compute", choices=["bfloat16", "float16", "float32"], default="bfloat16")
p.add_argument("--optim", default="paged_adamw_8bit")
p.add_argument("--no-checkpoints", action="store_true")
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=512)
args = p.parse_args()
torch.manual_seed(0)
if args.weights == "int8":
    quantization = BitsAndBytesConfig(load_in_8bit=True)
else:
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=args.weights[:3],
        bnb_4bit_use_double_quant=args.weights.endswith("nested"),
        bnb_4bit_compute_dtype=getattr(torch, args.compute),
    )
model = AutoModelForCausalLM.from_pretrained(
    args.model, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": 0}
)
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=not args.no_checkpoints)
model = get_peft_model(
    model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
)
model.print_trainable_parameters()
tokens = torch.randint(4, 400, (8 * args.batch, args.seq))
rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in tokens]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=args.batch,
        learning_rate=2e-4,
        optim=args.optim,
        bf16=args.compute != "float16",
        fp16=args.compute == "float16",
        save_strategy="no",
        logging_steps=1,
        report_to=[],
    )
    Trainer(model, arguments, train_dataset=rows).train()
