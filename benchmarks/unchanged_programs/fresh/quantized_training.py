"""Quantization-aware training: weights and activations pass torch's fake quantizers, ranges follow a moving average."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--width", type=int, default=1024)
p.add_argument("--layers", type=int, default=8)
p.add_argument("--batch", type=int, default=4096)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class QuantizedLinear(nn.Linear):
    def __init__(self, inside, outside):
        super().__init__(inside, outside)
        self.register_buffer("scale", torch.tensor(0.1))
        self.register_buffer("zero", torch.tensor(0, dtype=torch.int32))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.scale.lerp_(x.abs().amax() / 127, 0.1)
        x = torch.fake_quantize_per_tensor_affine(x, self.scale, self.zero, -128, 127)
        scales = self.weight.detach().abs().amax(dim=1) / 127
        zeros = torch.zeros(len(scales), dtype=torch.int32, device=x.device)
        weight = torch.fake_quantize_per_channel_affine(self.weight, scales, zeros, 0, -128, 127)
        return F.linear(x, weight, self.bias)


layers = [
    part
    for _ in range(args.layers)
    for part in (QuantizedLinear(args.width, args.width), nn.BatchNorm1d(args.width), nn.ReLU6())
]
model = nn.Sequential(*layers, QuantizedLinear(args.width, 1000)).to(device)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9)
for _ in range(4):
    loss = F.cross_entropy(
        model(torch.randn(args.batch, args.width, device=device)), torch.randint(0, 1000, (args.batch,), device=device)
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.inference_mode():
    print(model(torch.randn(args.batch, args.width, device=device)).argmax(-1).float().mean().item())
