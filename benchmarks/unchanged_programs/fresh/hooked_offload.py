"""Checkpointed layers whose inputs wait in pinned main memory by saved-tensor hooks, and one layer without either."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=6)
p.add_argument("--width", type=int, default=1024)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=1024)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
layers = nn.ModuleList(
    nn.TransformerEncoderLayer(
        args.width, args.width // 64, 4 * args.width, 0.1, "gelu", batch_first=True, norm_first=True
    )
    for _ in range(args.layers)
).to(device)
head = nn.Linear(args.width, 4096).to(device)
weights = [*layers.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(weights, lr=1e-4, foreach=True)


def pack(tensor):
    return tensor.to(torch.float16) if tensor.is_floating_point() else tensor


def unpack(tensor):
    return tensor.float() if tensor.is_floating_point() else tensor


for _ in range(3):
    x = torch.randn(args.batch, args.seq, args.width, device=device)
    for index, layer in enumerate(layers):
        if index == 0:
            x = layer(x)
        elif index == 1:
            with saved_tensors_hooks(pack, unpack):
                x = layer(x)
        else:
            with save_on_cpu(pin_memory=device == "cuda"):
                x = checkpoint(layer, x, use_reentrant=False)
    loss = F.cross_entropy(head(x).flatten(0, 1), torch.randint(0, 4096, (args.batch * args.seq,), device=device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
