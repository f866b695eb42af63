"""A diffusion transformer on latents of a frozen encoder: modulated norms, average of the weights, dropped labels."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=12)
p.add_argument("--width", type=int, default=768)
p.add_argument("--batch", type=int, default=24)
p.add_argument("--size", type=int, default=256)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES = 1000


def encoder() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1)]
    for inner, outer in ((64, 128), (128, 256), (256, 256)):
        layers += [nn.GroupNorm(16, inner), nn.SiLU(), nn.Conv2d(inner, outer, 3, stride=2, padding=1)]
    return nn.Sequential(*layers, nn.Conv2d(256, 4, 1))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, width // 64, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, about: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulate(about)[:, None].chunk(6, -1)
        h = self.norm(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(h, h, h, need_weights=False)[0]
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class Transformer(nn.Module):
    def __init__(self, side: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, args.width, 2, 2)
        self.places = nn.Parameter(torch.randn(1, (side // 2) ** 2, args.width) * 0.02)
        self.labels, self.time = nn.Embedding(CLASSES + 1, args.width), nn.Linear(128, args.width)
        self.blocks = nn.ModuleList(Block(args.width) for _ in range(args.layers))
        self.norm, self.out = nn.LayerNorm(args.width), nn.Linear(args.width, 16)

    def forward(self, x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        angles = t[:, None] * torch.logspace(0, 3, 64, device=x.device)
        about = self.time(torch.cat([angles.sin(), angles.cos()], -1)) + self.labels(labels)
        h = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            h = block(h, about)
        return F.fold(self.out(self.norm(h)).transpose(1, 2), x.shape[-2:], 2, stride=2)


torch.manual_seed(0)
frozen = encoder().to(device).eval().requires_grad_(requires_grad=False)
model = Transformer(args.size // 8).to(device)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
for step in range(4):
    images = torch.rand(args.batch, 3, args.size, args.size).to(device)
    labels = torch.randint(CLASSES, (args.batch,)).to(device)
    labels = torch.where(torch.rand(args.batch, device=device) < 0.1, CLASSES, labels)
    with torch.autocast(device, dtype=torch.bfloat16):
        with torch.no_grad():
            latents = frozen(images * 2 - 1)
        t, noise = torch.rand(args.batch, device=device), torch.randn_like(latents)
        noisy = torch.lerp(latents, noise, t[:, None, None, None].to(latents.dtype))
        loss = F.mse_loss(model(noisy, t, labels), noise - latents)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    print(f"step {step} loss {loss.item():.4f}")
