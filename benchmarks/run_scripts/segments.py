"""Layers in a list, each in a reentrant checkpoint, without a module around them; LBFGS calls a closure twice."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(512, 2048), nn.SiLU(), nn.Linear(2048, 512)).cuda() for _ in range(6)]
optimizer = torch.optim.LBFGS([weight for layer in layers for weight in layer.parameters()], max_iter=2, history_size=2)
for _ in range(4):
    batch = torch.rand(4096, 512, device="cuda")

    def closure(batch: torch.Tensor = batch) -> torch.Tensor:
        optimizer.zero_grad()
        hidden = batch.clone().requires_grad_()
        for layer in layers:
            hidden = hidden + checkpoint(layer, hidden, use_reentrant=True)
        loss = hidden.square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
print("PEAK", torch.cuda.max_memory_allocated())
