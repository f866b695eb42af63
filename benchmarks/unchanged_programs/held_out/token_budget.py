"""GPT-J: rows of many lengths are batched up to a number of tokens; four such batches make a step."""

import argparse
import random

import torch
import torch.nn.functional as F
from transformers import GPTJConfig, GPTJForCausalLM

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=10)
p.add_argument("--width", type=int, default=1024)
p.add_argument("--tokens", type=int, default=6144)
p.add_argument("--longest", type=int, default=1536)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
draw = random.Random(2)
VOCABULARY = 40000


def batches(count: int):
    """Rows of about the same length, padded to the longest, at most `--tokens` in all."""
    for _ in range(count):
        longest = min(int(draw.lognormvariate(0, 0.7) * args.longest / 4) + 8, args.longest)
        lengths = torch.tensor([draw.randint(3 * longest // 4, longest) for _ in range(args.tokens // longest)])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        yield torch.randint(1, VOCABULARY, mask.shape) * mask, mask.long()


torch.manual_seed(0)
config = GPTJConfig(
    n_embd=args.width, n_layer=args.layers, n_head=args.width // 64, rotary_dim=32, vocab_size=VOCABULARY
)
model = GPTJForCausalLM(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=device == "cuda")
for step in range(4):
    group = list(batches(4))
    total = sum(int(mask[:, 1:].sum()) for _, mask in group)
    summed = 0.0
    for host_tokens, host_mask in group:
        tokens, mask = host_tokens.to(device), host_mask.to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        labels = tokens.masked_fill(mask == 0, -100)[:, 1:]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten(), reduction="sum") / total
        loss.backward()
        summed += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} tokens {total} loss {summed:.4f}")
