"""A student learns the distribution of a larger teacher: two models, KL in float32 over pieces, SGD with momentum."""

import argparse

import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=8)
p.add_argument("--width", type=int, default=768)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=768)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def qwen(layers: int, width: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        vocab_size=64000,
    )
    with torch.device(device):
        return Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)


teacher, student = qwen(2 * args.layers, 2 * args.width).eval(), qwen(args.layers, args.width)
student.gradient_checkpointing_enable()
student.train()
optimizer = torch.optim.SGD(student.parameters(), lr=1e-3, momentum=0.9)
for step in range(3):
    tokens = torch.randint(64000, (args.batch, args.seq), device=device)
    with torch.inference_mode():
        wanted = teacher(input_ids=tokens, use_cache=False).logits
    wanted = wanted.clone()
    logits = student(input_ids=tokens, use_cache=False).logits
    losses = [
        F.kl_div(a.float().div(2).log_softmax(-1), b.float().div(2).softmax(-1), reduction="batchmean")
        for a, b in zip(logits.split(1), wanted.split(1), strict=True)
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    print(f"step {step} loss {loss.item():.4f}")
