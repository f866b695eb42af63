"""Activations wait in pinned main memory (save_on_cpu) for half of the layers; RMSprop."""

import argparse

import torch
from torch.autograd.graph import save_on_cpu
from transformers import GPT2Config, GPT2LMHeadModel

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=12)
p.add_argument("--batch", type=int, default=8)
p.add_argument("--seq", type=int, default=1024)
p.add_argument("--width", type=int, default=768)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = GPT2Config(n_layer=args.layers, n_embd=args.width, n_head=args.width // 64, vocab_size=50257)
model = GPT2LMHeadModel(config).to(device=device, dtype=torch.bfloat16)
blocks = model.transformer.h
for block in blocks[: args.layers // 2]:
    inside = block.forward

    def forward(*inputs, inside=inside, **more):
        with save_on_cpu(pin_memory=device == "cuda"):
            return inside(*inputs, **more)

    block.forward = forward
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5, momentum=0.9)
for step in range(3):
    tokens = torch.randint(config.vocab_size, (args.batch, args.seq)).to(device)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
