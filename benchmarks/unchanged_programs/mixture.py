"""A Mixtral of small experts under bf16 autocast with the loss of its router; a held batch without gradients."""

import argparse

import torch
from transformers import MixtralConfig, MixtralForCausalLM

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=6)
p.add_argument("--width", type=int, default=768)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=512)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = MixtralConfig(
    hidden_size=args.width,
    intermediate_size=2 * args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 64,
    num_key_value_heads=args.width // 128,
    num_local_experts=8,
    num_experts_per_tok=2,
    vocab_size=32000,
    output_router_logits=True,
)
model = MixtralForCausalLM(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    tokens = torch.randint(32000, (args.batch, args.seq), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
