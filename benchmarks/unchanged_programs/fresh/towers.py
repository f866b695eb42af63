"""Two towers and a contrastive loss over a large batch: first without gradients, then chunk by chunk."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=6)
p.add_argument("--width", type=int, default=512)
p.add_argument("--batch", type=int, default=512)
p.add_argument("--chunk", type=int, default=64)
p.add_argument("--seq", type=int, default=64)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(30000, args.width, mode="mean")
        self.tokens = nn.Embedding(30000, args.width)
        layer = nn.TransformerEncoderLayer(args.width, args.width // 64, 2 * args.width, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)

    def forward(self, ids):
        x = self.encoder(self.tokens(ids)).mean(dim=1) + self.embed(ids)
        return F.normalize(x, dim=-1)


queries, answers = Tower().to(device), Tower().to(device)
both = queries, answers
temperature = nn.Parameter(torch.tensor(2.6, device=device))
optimizer = torch.optim.AdamW([*queries.parameters(), *answers.parameters(), temperature], lr=1e-4)
queue = F.normalize(torch.randn(4096, args.width, device=device), dim=-1)
for _ in range(3):
    data = [torch.randint(0, 30000, (args.batch, args.seq), device=device) for _ in range(2)]
    with torch.no_grad():
        found = [
            torch.cat([tower(part) for part in ids.split(args.chunk)]) for tower, ids in zip(both, data, strict=True)
        ]
    leaves = [each.requires_grad_() for each in found]
    scores = leaves[0] @ torch.cat([leaves[1], queue]).T * temperature.exp()
    loss = F.cross_entropy(scores, torch.arange(args.batch, device=device))
    loss.backward()
    for tower, ids, leaf in zip((queries, answers), data, leaves, strict=False):
        for part, gradient in zip(ids.split(args.chunk), leaf.grad.split(args.chunk), strict=False):
            (tower(part) * gradient).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    queue = torch.cat([queue[args.batch :], found[1].detach()])
    print(loss.item())
