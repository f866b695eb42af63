"""A Llama with this package's kernels applied and a plain loop in bf16 with master weights by hand."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ligerprof.kernels

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=8)
p.add_argument("--width", type=int, default=1024)
p.add_argument("--batch", type=int, default=8)
p.add_argument("--seq", type=int, default=1024)
args = p.parse_args()
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=args.width,
    intermediate_size=args.width * 7 // 2,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 64,
    num_key_value_heads=args.width // 256,
    vocab_size=128256,
)
model = LlamaForCausalLM(config).to("cuda", dtype=torch.bfloat16)
ligerprof.kernels.apply(model, "all")
masters = [w.detach().float() for w in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=1e-4)
for step in range(3):
    tokens = torch.randint(config.vocab_size, (args.batch, args.seq), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    for master, weight in zip(masters, model.parameters(), strict=True):
        master.grad, weight.grad = weight.grad.float(), None
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), masters)
    print(f"step {step} loss {loss.item():.4f}")
