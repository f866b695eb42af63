"""A waveform network under float16 autocast with GradScaler: dilated convolutions, losses on complex spectrograms."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=16)
p.add_argument("--samples", type=int, default=65536)
p.add_argument("--width", type=int, default=256)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (512, 1024, 2048)


class Dilated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 3, padding=d, dilation=d) for d in (1, 3, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            x = x + conv(F.leaky_relu(x, 0.1))
        return x


class Vocoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv1d(80, width, 7, padding=3)]
        for i, rate in enumerate((8, 8, 4)):
            inner = width // 2**i
            layers += [nn.ConvTranspose1d(inner, inner // 2, 2 * rate, rate, rate // 2), Dilated(inner // 2)]
        self.layers = nn.Sequential(*layers, nn.LeakyReLU(0.1), nn.Conv1d(width // 8, 1, 7, padding=3), nn.Tanh())

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        return self.layers(mel).squeeze(1)


def spectral_loss(made: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    total = made.new_zeros(())
    for size in SIZES:
        window = torch.hann_window(size, device=made.device)
        first, second = (torch.stft(x, size, size // 4, window=window, return_complex=True).abs() for x in (made, real))
        total = total + (first - second).norm() / second.norm() + F.l1_loss((first + 1e-5).log(), (second + 1e-5).log())
    return total / len(SIZES)


torch.manual_seed(0)
model = Vocoder(args.width).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.8, 0.99))
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
for step in range(5):
    mel, real = torch.randn(args.batch, 80, args.samples // 256), torch.rand(args.batch, args.samples) * 2 - 1
    mel, real = mel.to(device), real.to(device)
    with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
        made = model(mel)
    loss = spectral_loss(made.float(), real)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale()}")
