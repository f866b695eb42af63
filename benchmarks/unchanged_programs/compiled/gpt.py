"""A GPT in plain torch under torch.compile, as people write it: autocast, a tied head, the loss in the model."""

import argparse

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=8)
p.add_argument("--width", type=int, default=768)
p.add_argument("--heads", type=int, default=12)
p.add_argument("--vocabulary", type=int, default=50304)
p.add_argument("--batch", type=int, default=8)
p.add_argument("--seq", type=int, default=1024)
p.add_argument("--compile", choices=("model", "layers", "loss", "optimizer", "none"), default="model")
p.add_argument("--checkpoint", action="store_true")
p.add_argument("--lengths", default="")
p.add_argument("--budget", type=float, default=1.0)
args = p.parse_args()
torch._functorch.config.activation_memory_budget = args.budget


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(args.width) for _ in range(2))
        self.qkv = nn.Linear(args.width, 3 * args.width)
        self.out = nn.Linear(args.width, args.width)
        self.up = nn.Linear(args.width, 4 * args.width)
        self.down = nn.Linear(4 * args.width, args.width)

    def forward(self, x):
        b, t, c = x.shape
        parts = self.qkv(self.norms[0](x)).view(b, t, 3, args.heads, c // args.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Embedding(args.seq, args.width)
        self.layers = nn.ModuleList(Layer() for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if args.checkpoint else layer(x)
        return self.head(self.norm(x))


def loss_of(logits, targets):
    return F.cross_entropy(logits.float().view(-1, args.vocabulary), targets.reshape(-1))


def whole(tokens, targets):
    return loss_of(model(tokens), targets)


torch.manual_seed(0)
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=args.compile != "optimizer")
step = optimizer.step
if args.compile == "model":
    whole = torch.compile(whole)
elif args.compile == "layers":
    for layer in model.layers:
        layer.compile()
elif args.compile == "loss":
    loss_of = torch.compile(loss_of)
elif args.compile == "optimizer":
    step = torch.compile(optimizer.step)
lengths = [int(each) for each in args.lengths.split(",") if each] or [args.seq] * 4
for number, length in enumerate(lengths):
    tokens = torch.randint(args.vocabulary, (args.batch, length + 1), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = whole(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    step()
    optimizer.zero_grad()
    print(f"step {number} loss {loss.item():.3f}")
