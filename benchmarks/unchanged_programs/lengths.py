"""Every batch has another length, so the allocator's blocks do not fit the next one; no autocast, Adam, evaluation."""

import argparse
import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=8)
p.add_argument("--width", type=int, default=1024)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--longest", type=int, default=1500)
p.add_argument("--steps", type=int, default=10)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
draw = random.Random(11)
config = LlamaConfig(
    hidden_size=args.width,
    intermediate_size=args.width * 3,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 128,
    num_key_value_heads=args.width // 128,
    vocab_size=50000,
)
model = LlamaForCausalLM(config).to(device, dtype=torch.bfloat16)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(args.steps):
    length = draw.randrange(args.longest // 5, args.longest)
    tokens = torch.randint(50000, (args.batch, length), device=device)
    if step % 4 == 3:
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=tokens).logits
        print("held", logits.float().log_softmax(-1).gather(-1, tokens[..., None]).mean().item())
        model.train()
        del logits
        continue
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} length {length} loss {loss.item():.4f}")
