"""A plain loop over a causal model with an optimizer of bitsandbytes."""

import argparse

import bitsandbytes
import torch
from transformers import AutoModelForCausalLM

p = argparse.ArgumentParser()
p.add_argument("model")
p.add_argument("--optimizer", default="AdamW8bit")
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=512)
args = p.parse_args()
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).cuda()
model.train()
optimizer = getattr(bitsandbytes.optim, args.optimizer)(model.parameters(), lr=1e-5)
for step in range(3):
    tokens = torch.randint(4, 400, (args.batch, args.seq), device="cuda")
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
