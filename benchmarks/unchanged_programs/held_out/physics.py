"""A network that solves a differential equation: second derivatives by autograd in float64, L-BFGS with line search."""

import argparse

import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--points", type=int, default=60_000)
p.add_argument("--width", type=int, default=128)
p.add_argument("--layers", type=int, default=5)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
layers: list[nn.Module] = [nn.Linear(2, args.width), nn.Tanh()]
for _ in range(args.layers):
    layers += [nn.Linear(args.width, args.width), nn.Tanh()]
model = nn.Sequential(*layers, nn.Linear(args.width, 1)).to(device)
inside = torch.rand(args.points, 2, device=device)
border = torch.rand(args.points // 8, 2, device=device)
border[:, 1] = border[:, 1].round()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6, history_size=20, line_search_fn="strong_wolfe")


def slope(value: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value.sum(), at, create_graph=True)[0]


def closure() -> torch.Tensor:
    optimizer.zero_grad()
    at = inside.detach().requires_grad_()
    u = model(at)
    first = slope(u, at)
    second = slope(first[:, 0], at)[:, 0]
    flow = first[:, 1] + u[:, 0] * first[:, 0] - 0.01 * second
    loss = flow.square().mean() + (model(border)[:, 0] - torch.sin(torch.pi * border[:, 0])).square().mean()
    loss.backward()
    return loss


for step in range(3):
    loss = optimizer.step(closure)
    print(f"step {step} loss {loss.item():.6f}")
