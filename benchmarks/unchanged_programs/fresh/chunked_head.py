"""Custom autograd functions: a cross entropy in chunks that keeps no logits, and an activation that recomputes."""

import argparse

import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--width", type=int, default=1024)
p.add_argument("--layers", type=int, default=6)
p.add_argument("--tokens", type=int, default=8192)
p.add_argument("--vocabulary", type=int, default=64000)
p.add_argument("--chunks", type=int, default=8)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.relu(x).square()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * gradient * torch.relu(x)


class ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, chunks):
        total = hidden.new_zeros((), dtype=torch.float32)
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for rows, target, out in zip(hidden.chunk(chunks), labels.chunk(chunks), of_hidden.chunk(chunks), strict=False):
            logits = (rows @ weight.T).float()
            scale = torch.logsumexp(logits, dim=-1, keepdim=True)
            total += (scale.squeeze(-1) - logits.gather(1, target[:, None]).squeeze(-1)).sum()
            probabilities = (logits - scale).exp_()
            probabilities.scatter_add_(1, target[:, None], torch.full_like(scale, -1.0))
            probabilities /= len(labels)
            small = probabilities.to(hidden.dtype)
            torch.mm(small, weight, out=out)
            of_weight += small.T @ rows
        ctx.save_for_backward(of_hidden, of_weight.to(weight.dtype))
        return total / len(labels)

    @staticmethod
    def backward(ctx, gradient):
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * gradient, of_weight * gradient, None, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(args.vocabulary, args.width)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [nn.LayerNorm(args.width), nn.Linear(args.width, 4 * args.width), nn.Linear(4 * args.width, args.width)]
            )
            for _ in range(args.layers)
        )

    def forward(self, ids):
        x = self.embed(ids)
        for norm, up, down in self.layers:
            x = x + down(SquaredRelu.apply(up(norm(x))))
        return x


model = Model().to(device, torch.bfloat16)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for _ in range(3):
    ids = torch.randint(0, args.vocabulary, (args.tokens,), device=device)
    loss = ChunkedLoss.apply(model(ids), model.embed.weight, ids.roll(-1), args.chunks)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
