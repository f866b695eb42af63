"""A selective state space model in plain torch: depthwise convolutions and a scan over pieces of the sequence."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=6)
p.add_argument("--width", type=int, default=512)
p.add_argument("--batch", type=int, default=8)
p.add_argument("--seq", type=int, default=512)
p.add_argument("--vocabulary", type=int, default=16000)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
STATES, PIECE = 16, 64


def scan(decay: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """State after each token; both are [batch, time, channels, states]."""
    state, states = torch.zeros_like(inputs[:, 0]), []
    for rates, piece in zip(decay.split(PIECE, 1), inputs.split(PIECE, 1), strict=True):
        total = rates.clamp(min=1e-4).log().cumsum(1)
        weights = torch.exp((-total).clamp(max=30))
        here = total.exp() * (state[:, None] + (piece * weights).cumsum(1))
        states.append(here)
        state = here[:, -1]
    return torch.cat(states, 1)


class Mixer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 2 * width
        self.norm, self.enter = nn.RMSNorm(width), nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.select, self.rate = nn.Linear(inner, 32 + 2 * STATES, bias=False), nn.Linear(32, inner)
        self.log_decay = nn.Parameter(torch.arange(1.0, STATES + 1).log().repeat(inner, 1))
        self.skip, self.leave = nn.Parameter(torch.ones(inner)), nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, gate = self.enter(self.norm(x)).chunk(2, -1)
        h = F.silu(self.conv(h.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        rate, b, c = self.select(h).split([32, STATES, STATES], -1)
        rate = F.softplus(self.rate(rate)).float()
        decay = torch.exp(-rate[..., None] * self.log_decay.exp())
        states = scan(decay, (rate * h)[..., None] * b[:, :, None].float())
        y = torch.einsum("btcs,bts->btc", states, c.float()) + self.skip * h
        return x + self.leave(y.to(gate.dtype) * F.silu(gate))


torch.manual_seed(0)
embedding = nn.Embedding(args.vocabulary, args.width)
layers = [Mixer(args.width) for _ in range(args.layers)]
model = nn.Sequential(embedding, *layers, nn.RMSNorm(args.width), nn.Linear(args.width, args.vocabulary)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(3):
    tokens = torch.randint(args.vocabulary, (args.batch, args.seq), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
