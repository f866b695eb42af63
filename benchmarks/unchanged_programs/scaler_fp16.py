"""A GPT in plain torch: float16 autocast, GradScaler, clipping, a cosine schedule."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=12)
p.add_argument("--width", type=int, default=768)
p.add_argument("--batch", type=int, default=12)
p.add_argument("--seq", type=int, default=1024)
p.add_argument("--vocabulary", type=int, default=50304)
p.add_argument("--steps", type=int, default=4)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.drop = width // 64, 0.1
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(w, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.drop if self.training else 0.0)
        return self.out(y.transpose(1, 2).contiguous().view(b, t, w))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(args.vocabulary, args.width), nn.Embedding(args.seq, args.width)
        self.blocks = nn.ModuleList(Block(args.width) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, args.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


torch.manual_seed(1337)
torch.set_float32_matmul_precision("high")
data = torch.randint(args.vocabulary, (1_000_000,))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - args.seq - 1, (args.batch,))
    x = torch.stack([data[i : i + args.seq] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + args.seq] for i in starts])
    if device == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x, y


model = GPT().to(device)
decayed = [w for w in model.parameters() if w.dim() > 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [w for w in model.parameters() if w.dim() < 2]}]
optimizer = torch.optim.AdamW(groups, lr=3e-4, weight_decay=0.0, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
for step in range(args.steps):
    x, y = batch()
    with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
        loss = model(x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    schedule.step()
    print(f"step {step} loss {loss.item():.4f} norm {norm.item():.3f} scale {scaler.get_scale()}")
