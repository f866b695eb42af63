"""Translation without recurrence: gated convolutions in encoder and decoder, attention in each decoder layer."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=10)
p.add_argument("--width", type=int, default=512)
p.add_argument("--batch", type=int, default=64)
p.add_argument("--longest", type=int, default=160)
p.add_argument("--vocabulary", type=int, default=24000)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Gated(nn.Module):
    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.pad = (2, 0) if causal else (1, 1)
        self.conv = weight_norm(nn.Conv1d(width, 2 * width, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(x, 0.1, self.training).transpose(1, 2)
        return F.glu(self.conv(F.pad(h, self.pad)), dim=1).transpose(1, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(args.vocabulary, args.width, padding_idx=0)
        self.target = nn.Embedding(args.vocabulary, args.width, padding_idx=0)
        self.places = nn.Embedding(args.longest, args.width)
        self.encoder = nn.ModuleList(Gated(args.width, causal=False) for _ in range(args.layers))
        self.decoder = nn.ModuleList(Gated(args.width, causal=True) for _ in range(args.layers))
        self.ask = nn.ModuleList(nn.Linear(args.width, args.width) for _ in range(args.layers))
        self.head = nn.Linear(args.width, args.vocabulary)

    def embed(self, table: nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
        return table(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(self.source, source)
        for layer in self.encoder:
            x = (layer(x) + x) * 0.5**0.5
        values, hidden = (x + first) * 0.5**0.5, source == 0
        y = start = self.embed(self.target, target)
        for layer, ask in zip(self.decoder, self.ask, strict=True):
            h = layer(y)
            scores = torch.bmm(ask(h) + start, x.transpose(1, 2)).masked_fill(hidden[:, None], -1e4)
            y = (h + torch.bmm(scores.softmax(-1), values) + y) * 0.5**0.5
        return self.head(y)


torch.manual_seed(0)
model = Model().to(device)
optimizer = torch.optim.NAdam(model.parameters(), lr=2e-4, foreach=False)
for step in range(5):
    lengths = torch.randint(args.longest // 3, args.longest, (args.batch,))
    longest = int(lengths.max())
    source = torch.randint(1, args.vocabulary, (args.batch, longest)) * (torch.arange(longest) < lengths[:, None])
    target = torch.randint(1, args.vocabulary, (args.batch, longest - 10 * step % 30 + 1))
    source, target = source.to(device), target.to(device)
    logits = model(source, target[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
