"""A ResNet-50 in channels_last with BatchNorm under bf16 autocast: SGD with momentum, an evaluation in between."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=96)
p.add_argument("--size", type=int, default=224)
p.add_argument("--depths", type=int, nargs=4, default=[3, 4, 6, 3])
p.add_argument("--width", type=int, default=64)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


def conv(inner: int, outer: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, size, stride, size // 2, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)
    )


class Bottleneck(nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.body = nn.Sequential(conv(inner, width, 1), conv(width, width, 3, stride), conv(width, outer, 1)[:2])
        self.skip = conv(inner, outer, 1, stride)[:2] if stride > 1 or inner != outer else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.skip(x), inplace=True)


def resnet() -> nn.Module:
    width, layers = args.width, [conv(3, args.width, 7, 2), nn.MaxPool2d(3, 2, 1)]
    for stage, depth in enumerate(args.depths):
        for i in range(depth):
            layers.append(Bottleneck(width, args.width * 2**stage, 2 if i == 0 and stage else 1))
            width = 4 * args.width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


torch.manual_seed(0)
model = resnet().to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
for step in range(4):
    images = torch.randn(args.batch, 3, args.size, args.size).to(device, memory_format=torch.channels_last)
    labels = torch.randint(1000, (args.batch,), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step == 1:
        model.eval()
        with torch.inference_mode(), torch.autocast(device, dtype=torch.bfloat16):
            right = (model(images).argmax(1) == labels).sum()
        model.train()
        print("right", right.item())
    print(f"step {step} loss {loss.item():.4f}")
