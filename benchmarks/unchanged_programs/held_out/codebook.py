"""A VQ-VAE: nearest codes by cdist, straight-through gradients, a code book kept by moving averages, pixel shuffles."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=32)
p.add_argument("--size", type=int, default=256)
p.add_argument("--width", type=int, default=128)
p.add_argument("--codes", type=int, default=4096)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
DEPTH = 64


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("book", torch.randn(args.codes, DEPTH))
        self.register_buffer("used", torch.ones(args.codes))
        self.register_buffer("sums", self.book.clone())

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = z.permute(0, 2, 3, 1).reshape(-1, DEPTH)
        nearest = torch.cdist(flat.detach(), self.book).argmin(1)
        if self.training:
            hot = F.one_hot(nearest, args.codes).to(flat.dtype)
            self.used.lerp_(hot.sum(0), 0.01)
            self.sums.lerp_(hot.T @ flat.detach(), 0.01)
            self.book.copy_(self.sums / self.used.clamp(min=1e-3)[:, None])
        q = self.book[nearest].view(len(z), *z.shape[2:], DEPTH).permute(0, 3, 1, 2)
        return z + (q - z).detach(), F.mse_loss(z, q)


def mix(width: int) -> nn.Module:
    return nn.Sequential(nn.ELU(), nn.Conv2d(width, width, 3, padding=1), nn.ELU(), nn.Conv2d(width, width, 1))


torch.manual_seed(0)
width = args.width
encoder = nn.Sequential(
    nn.PixelUnshuffle(2), nn.Conv2d(12, width, 3, padding=1), mix(width), nn.Conv2d(width, width, 4, 2, 1), mix(width)
).append(nn.Conv2d(width, DEPTH, 1))
decoder = nn.Sequential(
    nn.Conv2d(DEPTH, width, 3, padding=1), mix(width), nn.Conv2d(width, 4 * width, 1), nn.PixelShuffle(2)
).extend([mix(width), nn.Conv2d(width, 12, 3, padding=1), nn.PixelShuffle(2)])
model = nn.ModuleList([encoder, Codes(), decoder]).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, fused=device == "cuda")
for step in range(5):
    images = torch.rand(args.batch, 3, args.size, args.size).to(device)
    z, commitment = model[1](model[0](images))
    made = model[2](z)
    loss = F.mse_loss(made, images) + 0.25 * commitment
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
