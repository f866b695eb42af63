"""A residual CNN in channels_last with fp16 autocast and a GradScaler, SGD with momentum, and a test pass."""

import argparse

import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--width", type=int, default=96)
p.add_argument("--size", type=int, default=64)
p.add_argument("--batch", type=int, default=128)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inside),
            nn.ReLU(inplace=True),
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.Dropout(0.2),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
        )
        same = inside == outside and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x):
        return self.body(x) + self.short(x)


w = args.width
model = nn.Sequential(
    nn.Conv2d(3, w, 3, 1, 1, bias=False),
    *(Block(w, w, 1), Block(w, w, 1)),
    *(Block(w, 2 * w, 2), Block(2 * w, 2 * w, 1)),
    *(Block(2 * w, 4 * w, 2), Block(4 * w, 4 * w, 1)),
    nn.BatchNorm2d(4 * w),
    nn.ReLU(inplace=True),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(4 * w, 100),
)
model = model.to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
half = torch.float16 if device == "cuda" else torch.bfloat16
for step in range(4):
    images = torch.randn(args.batch, 3, args.size, args.size).to(device, memory_format=torch.channels_last)
    labels = torch.randint(0, 100, (args.batch,), device=device)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=half):
        loss = loss_of(model(images), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    if step == 1:
        model.eval()
        with torch.no_grad(), torch.autocast(device, dtype=half):
            found = model(torch.randn(2 * args.batch, 3, args.size, args.size, device=device)).argmax(1)
        print((found == 0).float().mean().item())
        model.train()
