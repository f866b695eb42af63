"""A plain loop over a causal model whose linear layers train in torchao's float8, checkpointed or not."""

import argparse

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import AutoModelForCausalLM

p = argparse.ArgumentParser()
p.add_argument("model")
p.add_argument("--recipe", default="tensorwise")
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=512)
p.add_argument("--checkpoint", action="store_true")
p.add_argument("--compile", action="store_true")
args = p.parse_args()
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).cuda().train()
if args.checkpoint:
    model.gradient_checkpointing_enable({"use_reentrant": False})
convert_to_float8_training(
    model,
    config=Float8LinearConfig.from_recipe_name(args.recipe),
    module_filter_fn=lambda module, path: path != "lm_head" and module.in_features % 16 == 0,
)
if args.compile:
    model.compile()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for step in range(3):
    tokens = torch.randint(4, 400, (args.batch, args.seq), device="cuda")
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
