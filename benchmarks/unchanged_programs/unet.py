"""A denoising UNet: convolutions, GroupNorm and attention, an average of the weights, then samples in a loop."""

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=32)
p.add_argument("--size", type=int, default=64)
p.add_argument("--width", type=int, default=128)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, inner), nn.SiLU(), nn.Conv2d(inner, outer, 3, padding=1))
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, outer))
        self.second = nn.Sequential(
            nn.GroupNorm(32, outer), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(outer, outer, 3, padding=1)
        )
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.first(x) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(h)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(32, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, c // 64, 64, h * w).transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(-1, -2).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        time, widths = 4 * width, [width, 2 * width, 2 * width]
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.shrink, inner = nn.ModuleList(), nn.ModuleList(), width
        for outer in widths:
            self.down.append(nn.ModuleList([Residual(inner, outer, time), Residual(outer, outer, time)]))
            self.shrink.append(nn.Conv2d(outer, outer, 3, 2, 1))
            inner = outer
        self.middle = nn.ModuleList([Residual(inner, inner, time), Attention(inner), Residual(inner, inner, time)])
        self.up = nn.ModuleList()
        for outer in reversed(widths):
            self.up.append(nn.ModuleList([Residual(inner + outer, outer, time), Residual(outer, outer, time)]))
            inner = outer
        self.leave = nn.Sequential(nn.GroupNorm(32, inner), nn.SiLU(), nn.Conv2d(inner, 3, 3, padding=1))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, device=x.device) / half)
        angles = t[:, None].float() * rates[None]
        time = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1))
        h, kept = self.enter(x), []
        for blocks, shrink in zip(self.down, self.shrink, strict=True):
            for block in blocks:
                h = block(h, time)
            kept.append(h)
            h = shrink(h)
        h = self.middle[2](self.middle[1](self.middle[0](h, time)), time)
        for blocks in self.up:
            h = torch.cat([F.interpolate(h, scale_factor=2.0, mode="nearest"), kept.pop()], dim=1)
            for block in blocks:
                h = block(h, time)
        return self.leave(h)


torch.manual_seed(0)
model = UNet(args.width).to(device)
average = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=device), 0)
for step in range(3):
    images, noise = torch.rand(args.batch, 3, args.size, args.size, device=device) * 2 - 1, None
    noise, t = torch.randn_like(images), torch.randint(1000, (args.batch,), device=device)
    a = alphas[t][:, None, None, None]
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.mse_loss(model(a.sqrt() * images + (1 - a).sqrt() * noise, t).float(), noise)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.01)
    print(f"step {step} loss {loss.item():.4f}")
with torch.inference_mode(), torch.autocast(device, dtype=torch.bfloat16):
    x = torch.randn(4, 3, args.size, args.size, device=device)
    for i in reversed(range(0, 1000, 100)):
        x = x - 0.1 * average(x, torch.full((4,), i, device=device))
print("sample", x.std().item())
