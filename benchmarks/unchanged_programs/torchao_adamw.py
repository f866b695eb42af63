"""A plain loop over a causal model with torchao's AdamW with 8-bit or 4-bit states."""

import argparse

import torch
from torchao.optim import AdamW4bit, AdamW8bit
from transformers import AutoModelForCausalLM

p = argparse.ArgumentParser()
p.add_argument("model")
p.add_argument("--bits", type=int, default=8)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=512)
args = p.parse_args()
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).cuda().train()
optimizer = {8: AdamW8bit, 4: AdamW4bit}[args.bits](model.parameters(), lr=1e-5)
for step in range(3):
    tokens = torch.randint(4, 400, (args.batch, args.seq), device="cuda")
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
