"""liger-kernel's patch on a Qwen2 and a plain loop: the fused loss, norms, gates and rotary embedding; fused AdamW."""

import argparse

import torch
from liger_kernel.transformers import apply_liger_kernel_to_qwen2
from transformers import Qwen2Config, Qwen2ForCausalLM

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=12)
p.add_argument("--width", type=int, default=896)
p.add_argument("--batch", type=int, default=8)
p.add_argument("--seq", type=int, default=1024)
args = p.parse_args()
torch.manual_seed(0)
apply_liger_kernel_to_qwen2()
config = Qwen2Config(
    hidden_size=args.width,
    intermediate_size=args.width * 38 // 7,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 64,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
)
model = Qwen2ForCausalLM(config).to("cuda", dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
for step in range(3):
    tokens = torch.randint(config.vocab_size, (args.batch, args.seq), device="cuda")
    labels = tokens.clone()
    labels[:, : args.seq // 4] = -100
    loss = model(input_ids=tokens, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
