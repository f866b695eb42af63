"""A radiance field in float32: samples along rays, coarse then fine by inverse sampling, images rendered in pieces."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--rays", type=int, default=4096)
p.add_argument("--samples", type=int, default=64)
p.add_argument("--width", type=int, default=256)
p.add_argument("--side", type=int, default=200)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


def waves(x: torch.Tensor, count: int) -> torch.Tensor:
    angles = x[..., None] * 2.0 ** torch.arange(count, device=x.device)
    return torch.cat([x, angles.sin().flatten(-2), angles.cos().flatten(-2)], -1)


class Field(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(63, width), *(nn.Linear(width, width) for _ in range(3))])
        self.second = nn.ModuleList([nn.Linear(width + 63, width), *(nn.Linear(width, width) for _ in range(3))])
        self.density, self.color = nn.Linear(width, 1), nn.Sequential(nn.Linear(width + 27, width // 2), nn.ReLU())
        self.out = nn.Linear(width // 2, 3)

    def forward(self, points: torch.Tensor, view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = places = waves(points, 10)
        for layer in self.first:
            h = F.relu(layer(h))
        h = torch.cat([h, places], -1)
        for layer in self.second:
            h = F.relu(layer(h))
        view = waves(view, 4)[:, None].expand(-1, points.shape[1], -1)
        return self.out(self.color(torch.cat([h, view], -1))).sigmoid(), F.softplus(self.density(h)).squeeze(-1)


def render(field: Field, start: torch.Tensor, view: torch.Tensor, depths: torch.Tensor):
    colors, density = field(start[:, None] + view[:, None] * depths[..., None], view)
    gaps = torch.diff(depths, dim=1, append=depths[:, -1:] + 1e3)
    opaque = 1 - torch.exp(-density * gaps)
    passed = torch.cumprod(torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque[:, :-1] + 1e-10], 1), 1)
    weights = opaque * passed
    return (weights[..., None] * colors).sum(1), weights


def both(start: torch.Tensor, view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    depths = torch.linspace(2, 6, args.samples, device=device).expand(len(start), -1)
    rough, weights = render(coarse, start, view, depths)
    chances = torch.cumsum(F.normalize(weights.detach() + 1e-5, p=1, dim=1), 1).contiguous()
    drawn = torch.searchsorted(chances, torch.rand(len(start), 2 * args.samples, device=device))
    more = depths.gather(1, drawn.clamp(max=args.samples - 1)) + torch.rand_like(drawn, dtype=torch.float) / 16
    return rough, render(fine, start, view, torch.cat([depths, more], 1).sort(1).values)[0]


torch.manual_seed(0)
coarse, fine = Field(args.width).to(device), Field(args.width).to(device)
optimizer = torch.optim.Adam([*coarse.parameters(), *fine.parameters()], lr=5e-4)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
for step in range(5):
    start, view = torch.randn(args.rays, 3).to(device), F.normalize(torch.randn(args.rays, 3), dim=1).to(device)
    color = torch.rand(args.rays, 3).to(device)
    loss = sum(F.mse_loss(part, color) for part in both(start, view))
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {loss.item():.4f}")
with torch.no_grad():
    rays = torch.randn(args.side**2, 3, device=device).split(args.rays)
    image = torch.cat([both(piece, F.normalize(piece, dim=1))[1] for piece in rays])
print("image", image.mean().item())
