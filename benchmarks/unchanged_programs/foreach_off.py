"""A Llama in float32 under bf16 autocast: AdamW and clipping without foreach, accumulation, an average, validation."""

import argparse

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import LlamaConfig, LlamaForCausalLM

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=10)
p.add_argument("--width", type=int, default=1024)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=768)
args = p.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=args.width,
    intermediate_size=args.width * 11 // 4,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 64,
    num_key_value_heads=args.width // 128,
    vocab_size=32000,
    tie_word_embeddings=False,
)
model = LlamaForCausalLM(config).to(device)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False, amsgrad=True)
for step in range(3):
    model.train()
    total = torch.zeros((), device=device)
    for _ in range(2):
        tokens = torch.randint(config.vocab_size, (args.batch, args.seq), device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss / 2
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    average.eval()
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        tokens = torch.randint(config.vocab_size, (2 * args.batch, args.seq), device=device)
        held = average(input_ids=tokens, labels=tokens).loss
    print(f"step {step} loss {total.item():.3f} held {held.item():.3f}")
