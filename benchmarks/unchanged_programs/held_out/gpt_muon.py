"""A decoder with rotary positions, grouped heads and SwiGLU: Muon for the matrices, AdamW for the rest."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=14)
p.add_argument("--width", type=int, default=1024)
p.add_argument("--batch", type=int, default=8)
p.add_argument("--seq", type=int, default=1536)
p.add_argument("--vocabulary", type=int, default=50304)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
HEAD = 64


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.groups = width // HEAD, max(width // HEAD // 4, 1)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * self.groups * HEAD, bias=False)
        self.gate, self.up = nn.Linear(width, 8 * width // 3, bias=False), nn.Linear(width, 8 * width // 3, bias=False)
        self.down = nn.Linear(8 * width // 3, width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        h = self.norm1(x)
        q = self.q(h).view(b, t, self.heads, HEAD).transpose(1, 2)
        k, v = self.kv(h).view(b, t, 2, self.groups, HEAD).permute(2, 0, 3, 1, 4)
        q, k = (F.rms_norm(rotate(y, angles), (HEAD,)) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.blocks = nn.ModuleList(Block(args.width) for _ in range(args.layers))
        self.norm, self.head = nn.RMSNorm(args.width), nn.Linear(args.width, args.vocabulary, bias=False)
        rates = 10000 ** (-torch.arange(0, HEAD, 2) / HEAD)
        self.register_buffer("angles", torch.outer(torch.arange(args.seq), rates))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.angles)
        logits = 30 * torch.tanh(self.head(self.norm(x)).float() / 30)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = True
model = Model().to(device)
matrices = [w for w in model.blocks.parameters() if w.ndim == 2]
others = [w for w in model.parameters() if not any(w is m for m in matrices)]
optimizers = [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01), torch.optim.AdamW(others, lr=3e-4)]
for step in range(4):
    tokens = torch.randint(args.vocabulary, (args.batch, args.seq + 1), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    print(f"step {step} loss {loss.item():.4f}")
