"""A short training of a convolutional network under a limit on the device's memory."""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--eval-batch", type=int, default=0)
parser.add_argument("--limit-bytes", type=int, default=0)
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--fused-optimizer", action="store_true")
options = parser.parse_args()


class Block(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(inside, outside, 3, padding=1, stride=2),
            nn.Conv2d(outside, outside, 3, padding=1),
        )
        self.norms = nn.ModuleList(nn.GroupNorm(8, outside) for _ in range(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norms[0](self.first(images)))
        return torch.relu(hidden + self.norms[1](self.second(hidden)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(3, 64), Block(64, 128), Block(128, 256), Block(256, 512)])
        self.head = nn.Linear(512, 100)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            images = checkpoint(block, images, use_reentrant=False) if options.checkpointing else block(images)
        return self.head(images.mean((2, 3)))


if options.limit_bytes:
    torch.cuda.set_per_process_memory_fraction(options.limit_bytes / torch.cuda.get_device_properties(0).total_memory)
torch.manual_seed(0)
model = Network().cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=options.fused_optimizer, foreach=not options.fused_optimizer)


def loss_of(rows: int) -> torch.Tensor:
    images, labels = torch.rand(rows, 3, 192, 192, device="cuda"), torch.randint(100, (rows,), device="cuda")
    return nn.functional.cross_entropy(model(images), labels)


for _ in range(4):
    model.train()
    for _ in range(options.accumulation):
        loss_of(options.batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    if options.eval_batch:
        model.eval()
        with torch.no_grad():
            loss_of(options.eval_batch)
print("RESERVED", torch.cuda.max_memory_reserved())
print("PEAK", torch.cuda.max_memory_allocated())
