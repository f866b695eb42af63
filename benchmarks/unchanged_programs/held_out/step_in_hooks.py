"""OPT fine-tuned with an Adafactor per weight that steps as soon as the weight's gradient is ready, then frees it."""

import argparse

import torch
from transformers import OPTConfig, OPTForCausalLM

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=24)
p.add_argument("--width", type=int, default=1024)
p.add_argument("--batch", type=int, default=8)
p.add_argument("--seq", type=int, default=512)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = OPTConfig(
    hidden_size=args.width,
    word_embed_proj_dim=args.width,
    ffn_dim=4 * args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 64,
    vocab_size=50272,
)
model = OPTForCausalLM(config).to(device, dtype=torch.bfloat16)
optimizers = {weight: torch.optim.Adafactor([weight], lr=1e-3) for weight in model.parameters()}


def step_now(weight: torch.Tensor) -> None:
    optimizers[weight].step()
    optimizers[weight].zero_grad()


for weight in model.parameters():
    weight.register_post_accumulate_grad_hook(step_now)
model.train()
for step in range(4):
    tokens = torch.randint(4, config.vocab_size, (args.batch, args.seq), device=device)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    print(f"step {step} loss {loss.item():.4f}")
