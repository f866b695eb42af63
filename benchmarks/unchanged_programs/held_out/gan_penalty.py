"""A WGAN with gradient penalty: two optimizers, five critic steps per generator step, gradients of gradients."""

import argparse

import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=64)
p.add_argument("--width", type=int, default=96)
p.add_argument("--noise", type=int, default=128)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


def generator(width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.ConvTranspose2d(args.noise, 8 * width, 4)]
    for inner, outer in ((8, 8), (8, 4), (4, 2), (2, 1)):
        layers += [nn.BatchNorm2d(inner * width), nn.ReLU(inplace=True)]
        layers += [nn.ConvTranspose2d(inner * width, outer * width, 4, 2, 1)]
    return nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, 3, 3, 1, 1), nn.Tanh())


def critic(width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1)]
    for inner, outer in ((1, 2), (2, 4), (4, 8), (8, 8)):
        layers += [nn.LeakyReLU(0.2), nn.Conv2d(inner * width, outer * width, 4, 2, 1)]
        layers += [nn.InstanceNorm2d(outer * width, affine=True)]
    return nn.Sequential(*layers, nn.LeakyReLU(0.2), nn.Conv2d(8 * width, 1, 4), nn.Flatten(0))


def penalty(real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    mixed = torch.lerp(real, made, torch.rand(len(real), 1, 1, 1, device=device)).requires_grad_()
    (gradients,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
    return ((gradients.flatten(1).norm(dim=1) - 1) ** 2).mean()


torch.manual_seed(0)
make, judge = generator(args.width).to(device), critic(args.width).to(device)
make_step = torch.optim.Adam(make.parameters(), lr=1e-4, betas=(0.0, 0.9))
judge_step = torch.optim.Adam(judge.parameters(), lr=1e-4, betas=(0.0, 0.9))
for step in range(3):
    for _ in range(5):
        real = torch.rand(args.batch, 3, 64, 64).to(device) * 2 - 1
        with torch.no_grad():
            made = make(torch.randn(args.batch, args.noise, 1, 1, device=device))
        judge_step.zero_grad()
        distance = judge(made).mean() - judge(real).mean()
        (distance + 10 * penalty(real, made)).backward()
        judge_step.step()
    judge.requires_grad_(requires_grad=False)
    make_step.zero_grad()
    loss = -judge(make(torch.randn(2 * args.batch, args.noise, 1, 1, device=device))).mean()
    loss.backward()
    make_step.step()
    judge.requires_grad_(requires_grad=True)
    print(f"step {step} distance {-distance.item():.4f} generator {loss.item():.4f}")
