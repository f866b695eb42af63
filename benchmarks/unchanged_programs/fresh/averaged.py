"""A small GPT written by hand: EMA of weights by AveragedModel, accumulation, and evaluation of the average."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=8)
p.add_argument("--width", type=int, default=640)
p.add_argument("--batch", type=int, default=12)
p.add_argument("--seq", type=int, default=512)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 8 * width // 3 * 2), nn.Linear(8 * width // 3, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, -1, 64).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        gate, value = self.up(self.second(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(16000, args.width)
        self.places = nn.Parameter(torch.zeros(args.seq, args.width))
        self.layers = nn.ModuleList(Layer(args.width) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.width)

    def forward(self, ids):
        x = self.tokens(ids) + self.places[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.tokens.weight.T


model = Model().to(device)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
for step in range(3):
    for _ in range(3):
        ids = torch.randint(0, 16000, (args.batch, args.seq + 1), device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / 3
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        print(step, F.cross_entropy(average(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).item())
