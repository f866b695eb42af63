"""Private training by hand: per-sample gradients of torch.func (vmap of grad), clipped, summed and noised."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

p = argparse.ArgumentParser()
p.add_argument("--width", type=int, default=64)
p.add_argument("--size", type=int, default=32)
p.add_argument("--batch", type=int, default=64)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
w = args.width
model = nn.Sequential(
    *(nn.Conv2d(3, w, 3, padding=1), nn.GroupNorm(8, w), nn.SiLU(), nn.AvgPool2d(2)),
    *(nn.Conv2d(w, 2 * w, 3, padding=1), nn.GroupNorm(8, 2 * w), nn.SiLU(), nn.AvgPool2d(2)),
    *(nn.Flatten(), nn.Linear(2 * w * (args.size // 4) ** 2, 256), nn.Tanh(), nn.Linear(256, 10)),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
weights = {name: value.detach() for name, value in model.named_parameters()}


def loss_of(weights, image, label):
    return F.cross_entropy(functional_call(model, weights, (image[None],)), label[None])


per_sample = vmap(grad(loss_of), in_dims=(None, 0, 0))
for _ in range(4):
    images = torch.randn(args.batch, 3, args.size, args.size, device=device)
    labels = torch.randint(0, 10, (args.batch,), device=device)
    gradients = per_sample(weights, images, labels)
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients.values()], dim=1).norm(dim=1)
    factors = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for name, parameter in model.named_parameters():
        clipped = torch.einsum("n,n...->...", factors, gradients[name])
        parameter.grad = (clipped + torch.randn_like(clipped)) / args.batch
    optimizer.step()
    optimizer.zero_grad()
    print(norms.mean().item())
