"""A causal model of transformers under torch.compile, in a plain loop."""

import argparse

import torch
from transformers import AutoModelForCausalLM

p = argparse.ArgumentParser()
p.add_argument("model")
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=512)
p.add_argument("--checkpoint", action="store_true")
p.add_argument("--lora", action="store_true")
p.add_argument("--accumulation", type=int, default=1)
args = p.parse_args()
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).cuda().train()
if args.checkpoint:
    model.gradient_checkpointing_enable({"use_reentrant": False})
if args.lora:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=16, lora_dropout=0.05, target_modules="all-linear"))
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-5)
compiled = torch.compile(model)
for step in range(3):
    for _ in range(args.accumulation):
        tokens = torch.randint(4, 400, (args.batch, args.seq), device="cuda")
        loss = compiled(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
