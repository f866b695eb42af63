"""A U-Net for segmentation in float16: BatchNorm, transposed convolutions, dice loss, GradScaler, Nesterov's SGD."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=12)
p.add_argument("--size", type=int, default=384)
p.add_argument("--width", type=int, default=48)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES = 21


def double(inner: int, outer: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inner, outer):
        layers += [nn.Conv2d(channels, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(5)]
        self.down = nn.ModuleList(double(i, o) for i, o in zip([3, *widths], widths, strict=False))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, stride=2) for i, o in pairs)
        self.up = nn.ModuleList(double(i, o) for i, o in pairs)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        kept.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([kept.pop(), grow(x)], 1))
        return self.head(x)


def dice(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    chances, truth = logits.softmax(1), F.one_hot(masks, CLASSES).permute(0, 3, 1, 2)
    shared = (chances * truth).sum((2, 3))
    return 1 - (2 * shared / (chances.sum((2, 3)) + truth.sum((2, 3)) + 1e-6)).mean()


torch.manual_seed(0)
model = UNet(args.width).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5)
scaler = torch.amp.GradScaler(device, enabled=device == "cuda", init_scale=2.0**12)
for epoch in range(2):
    model.train()
    for _ in range(3):
        images = torch.randn(args.batch, 3, args.size, args.size).to(device)
        masks = torch.randint(CLASSES, (args.batch, args.size, args.size)).to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
            logits = model(images)
        loss = F.cross_entropy(logits.float(), masks) + dice(logits.float(), masks)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 12)
        scaler.step(optimizer)
        scaler.update()
    model.eval()
    with torch.no_grad():
        classes = model(images).argmax(1)
    print(f"epoch {epoch} loss {loss.item():.4f} hit {(classes == masks).float().mean().item():.3f}")
