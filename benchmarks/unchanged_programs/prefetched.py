"""Batches come on a stream of their own (record_stream), statistics go back on another; a plain conv net."""

import argparse
import itertools

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=64)
p.add_argument("--size", type=int, default=128)
p.add_argument("--steps", type=int, default=8)
args = p.parse_args()


class Prefetcher:
    def __init__(self, count: int) -> None:
        self.left, self.stream = count, torch.cuda.Stream()
        self.preload()

    def preload(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.images = None
            return
        images = torch.randint(256, (args.batch, 3, args.size, args.size), dtype=torch.uint8).pin_memory()
        labels = torch.randint(100, (args.batch,)).pin_memory()
        with torch.cuda.stream(self.stream):
            self.images = images.cuda(non_blocking=True).float().div_(255).sub_(0.5)
            self.labels = labels.cuda(non_blocking=True)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        images, labels = self.images, self.labels
        if images is not None:
            images.record_stream(torch.cuda.current_stream())
            labels.record_stream(torch.cuda.current_stream())
            self.preload()
        return images, labels


torch.manual_seed(0)
widths = [3, 64, 128, 256, 512]
layers = []
for inner, outer in itertools.pairwise(widths):
    layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(8, outer), nn.GELU(), nn.MaxPool2d(2)]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100)).cuda()
optimizer, side = torch.optim.Adam(model.parameters(), lr=1e-3), torch.cuda.Stream()
loader, kept = Prefetcher(args.steps), []
images, labels = loader.next()
while images is not None:
    features = model[:-1](images)
    loss = F.cross_entropy(model[-1](features), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        done = features.detach() @ features.detach().T
        host = torch.empty(done.shape, pin_memory=True)
        host.copy_(done, non_blocking=True)
        features.record_stream(side)
    kept.append(host)
    images, labels = loader.next()
torch.cuda.synchronize()
print("steps", len(kept), "similarity", kept[-1].mean().item())
