"""LoRA written by hand into transformers' GPT-2: frozen bf16 weights, fp32 adapters, merged at the end."""

import argparse

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=12)
p.add_argument("--width", type=int, default=768)
p.add_argument("--batch", type=int, default=6)
p.add_argument("--seq", type=int, default=768)
p.add_argument("--rank", type=int, default=16)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Adapted(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        inside, outside = base.weight.shape
        self.down = nn.Parameter(torch.randn(inside, rank) / rank, requires_grad=True)
        self.up = nn.Parameter(torch.zeros(rank, outside), requires_grad=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.base(x) + (self.dropout(x).float() @ self.down @ self.up).to(x.dtype)

    @torch.no_grad()
    def merge(self):
        self.base.weight += (self.down @ self.up).to(self.base.weight.dtype)
        return self.base


config = GPT2Config(n_layer=args.layers, n_embd=args.width, n_head=args.width // 64, n_positions=args.seq)
model = GPT2LMHeadModel(config).to(torch.bfloat16).requires_grad_(requires_grad=False)
for block in model.transformer.h:
    for name, module in list(block.attn.named_children()):
        if isinstance(module, Conv1D):
            setattr(block.attn, name, Adapted(module, args.rank))
model.to(device)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.RAdam(trained, lr=1e-3)
for _ in range(4):
    ids = torch.randint(0, 50257, (args.batch, args.seq), device=device)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
for block in model.transformer.h:
    for name, module in list(block.attn.named_children()):
        if isinstance(module, Adapted):
            setattr(block.attn, name, module.merge())
with torch.inference_mode():
    print(model(ids[:2]).logits.float().std().item())
