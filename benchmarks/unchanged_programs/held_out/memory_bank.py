"""Contrastive learning with a queue of keys and a slow copy of the encoder (timm's ResNet), SGD."""

import argparse
import copy

import timm
import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--model", default="resnet50")
p.add_argument("--batch", type=int, default=96)
p.add_argument("--size", type=int, default=192)
p.add_argument("--queue", type=int, default=65536)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = timm.create_model(args.model, num_classes=0)
        width = self.body.num_features
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 128))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.head(self.body(images)), dim=1)


def augment(images: torch.Tensor) -> torch.Tensor:
    images = images * (0.6 + 0.8 * torch.rand(len(images), 1, 1, 1, device=device))
    return images.flip(3) if torch.rand(()) < 0.5 else images + 0.05 * torch.randn_like(images)


torch.manual_seed(0)
query = Encoder().to(device)
key = copy.deepcopy(query).requires_grad_(requires_grad=False)
queue, place = F.normalize(torch.randn(128, args.queue, device=device), dim=0), 0
optimizer = torch.optim.SGD(query.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
for step in range(5):
    images = torch.rand(args.batch, 3, args.size, args.size).to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        q = query(augment(images))
        with torch.no_grad():
            for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                slow.mul_(0.999).add_(fast, alpha=0.001)
            order = torch.randperm(args.batch, device=device)
            k = key(augment(images)[order])[order.argsort()]
        same, others = (q * k).sum(1, keepdim=True), q @ queue.clone().detach()
        logits = torch.cat([same, others], 1) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(args.batch, dtype=torch.long, device=device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    queue[:, place : place + args.batch] = k.T
    place = (place + args.batch) % (args.queue - args.batch)
    print(f"step {step} loss {loss.item():.4f}")
