"""A small GPT with attention by einsum and a learned bias of positions, tied weights, fused AdamW and accumulation."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=10)
p.add_argument("--width", type=int, default=640)
p.add_argument("--batch", type=int, default=8)
p.add_argument("--seq", type=int, default=768)
p.add_argument("--vocabulary", type=int, default=32000)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(heads, width, width // heads) * 0.02) for _ in range(3))
        self.out = nn.Parameter(torch.randn(heads, width // heads, width) * 0.02)
        self.distance = nn.Parameter(torch.zeros(heads, args.seq))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.einsum("btw,hwd->bhtd", x, weight) for weight in (self.q, self.k, self.v))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
        places = torch.arange(x.shape[1], device=x.device)
        gaps = places[:, None] - places[None]
        scores = scores + self.distance[:, gaps.clamp(min=0)]
        scores = scores.masked_fill(gaps < 0, float("-inf"))
        weights = F.dropout(scores.softmax(-1), 0.1, self.training)
        return torch.einsum("bhqk,bhkd,hdw->bqw", weights, v, self.out)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, width // 64)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.blocks = nn.Sequential(*(Block(args.width) for _ in range(args.layers)))
        self.norm = nn.LayerNorm(args.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(self.blocks(self.tokens(tokens))), self.tokens.weight)


torch.manual_seed(0)
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
for step in range(4):
    for _ in range(3):
        tokens = torch.randint(args.vocabulary, (args.batch, args.seq + 1)).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, args.vocabulary), tokens[:, 1:].reshape(-1)) / 3
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {step} loss {3 * loss.item():.4f}")
