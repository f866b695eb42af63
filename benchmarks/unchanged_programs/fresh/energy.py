"""A learned energy whose gradients are forces: the loss needs second derivatives, and a gradient penalty."""

import argparse

import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--width", type=int, default=256)
p.add_argument("--layers", type=int, default=4)
p.add_argument("--batch", type=int, default=32)
p.add_argument("--atoms", type=int, default=48)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Message(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x, near):
        messages = torch.einsum("bijw,bjw->biw", self.filter(near), x)
        return x + self.update(torch.cat([x, messages], dim=-1))


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(20, args.width)
        self.layers = nn.ModuleList(Message(args.width) for _ in range(args.layers))
        self.head = nn.Linear(args.width, 1)
        self.register_buffer("centers", torch.linspace(0, 5, 32))

    def forward(self, kinds, places):
        distances = (places[:, :, None] - places[:, None]).square().sum(-1).add(1e-6).sqrt()
        near = torch.exp(-((distances[..., None] - self.centers) ** 2))
        x = self.kinds(kinds)
        for layer in self.layers:
            x = layer(x, near)
        return self.head(x).sum(dim=(1, 2))


model = Energy().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
for _ in range(3):
    kinds = torch.randint(0, 20, (args.batch, args.atoms), device=device)
    places = torch.randn(args.batch, args.atoms, 3, device=device, requires_grad=True)
    energy = model(kinds, places)
    (forces,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
    loss = energy.square().mean() + (forces + places.detach()).square().mean()
    loss = loss + 0.1 * (forces.flatten(1).norm(dim=1) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
