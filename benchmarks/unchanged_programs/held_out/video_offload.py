"""A 3-D convolutional network on clips: what backward needs waits in pinned main memory, SGD with momentum."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=8)
p.add_argument("--frames", type=int, default=16)
p.add_argument("--size", type=int, default=112)
p.add_argument("--width", type=int, default=64)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Residual(nn.Module):
    """A convolution over space, then one over time, with a short cut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.space = nn.Conv3d(inner, outer, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False)
        self.time = nn.Conv3d(outer, outer, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False)
        self.norm1, self.norm2 = nn.BatchNorm3d(outer), nn.BatchNorm3d(outer)
        self.short = nn.Conv3d(inner, outer, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm2(self.time(F.relu(self.norm1(self.space(x)))))
        return F.relu(h + self.short(x))


torch.manual_seed(0)
width = args.width
model = nn.Sequential(
    nn.Conv3d(3, width, (3, 7, 7), (1, 2, 2), (1, 3, 3)),
    Residual(width, width, 1),
    Residual(width, 2 * width, 2),
    Residual(2 * width, 4 * width, 2),
    Residual(4 * width, 8 * width, 2),
    nn.AdaptiveAvgPool3d(1),
    nn.Flatten(),
    nn.Linear(8 * width, 400),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(4):
    clips = torch.randn(args.batch, 3, args.frames, args.size, args.size).to(device)
    with torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"):
        loss = F.cross_entropy(model(clips), torch.randint(400, (args.batch,), device=device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
