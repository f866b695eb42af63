"""A small GPT whose attention is FlexAttention without torch.compile: causal documents, and a bias of the distance."""

import argparse
import warnings

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=4)
p.add_argument("--width", type=int, default=512)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=1024)
args = p.parse_args()
warnings.simplefilter("ignore")
torch.manual_seed(0)
HEADS = args.width // 64
documents = (torch.arange(args.seq, device="cuda") // 300).expand(args.batch, -1).contiguous()


def visible(b, _h, q, k):
    return (q >= k) & (documents[b, q] == documents[b, k])


def near(score, _b, h, q, k):
    return score + (k - q) * 2.0 ** -(h + 1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.other = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.qkv, self.out = nn.Linear(args.width, 3 * args.width), nn.Linear(args.width, args.width)
        self.up, self.down = nn.Linear(args.width, 4 * args.width), nn.Linear(4 * args.width, args.width)

    def forward(self, x, mask):
        q, k, v = (part.view(*x.shape[:2], HEADS, 64).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(flex_attention(q, k, v, near, mask).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.other(x))))


embedding = nn.Embedding(8192, args.width, device="cuda")
layers = nn.ModuleList(Layer() for _ in range(args.layers)).cuda()
optimizer = torch.optim.AdamW([*embedding.parameters(), *layers.parameters()], lr=1e-4)
for step in range(3):
    mask = create_block_mask(visible, args.batch, None, args.seq, args.seq, device="cuda")
    tokens = torch.randint(0, 8192, (args.batch, args.seq), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        hidden = embedding(tokens)
        for layer in layers:
            hidden = layer(hidden, mask)
        logits = hidden @ embedding.weight.t()
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
