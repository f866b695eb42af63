"""A frozen bf16 Llama teaches a smaller one: soft targets with a temperature, hidden states through a projection."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=8)
p.add_argument("--width", type=int, default=1024)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=512)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def made(layers, width):
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(width // 256, 1),
    )
    return LlamaForCausalLM(config)


teacher = made(args.layers, args.width).to(device, torch.bfloat16).eval().requires_grad_(requires_grad=False)
student = made(args.layers // 2, args.width // 2).to(device)
student.gradient_checkpointing_enable()
bridge = nn.Linear(args.width // 2, args.width).to(device)
optimizer = torch.optim.AdamW([*student.parameters(), *bridge.parameters()], lr=2e-4)
schedule = get_linear_schedule_with_warmup(optimizer, 1, 4)
for _ in range(4):
    ids = torch.randint(0, 32000, (args.batch, args.seq), device=device)
    with torch.inference_mode():
        known = teacher(ids, output_hidden_states=True)
    targets, hints = known.logits.clone(), known.hidden_states[-1].clone()
    del known
    with torch.autocast(device, dtype=torch.bfloat16):
        out = student(input_ids=ids, labels=ids, output_hidden_states=True, use_cache=False)
        soft = F.kl_div(F.log_softmax(out.logits / 2, -1), F.softmax(targets.float() / 2, -1), reduction="batchmean")
        loss = 0.5 * out.loss + 0.5 * soft / args.seq + 0.1 * F.mse_loss(bridge(out.hidden_states[-1]), hints)
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    print(loss.item())
