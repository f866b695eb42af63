"""A loop that keeps the losses of all steps with their graphs."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
losses = []
for _ in range(10):
    outputs = model(torch.rand(512, 1024, device="cuda"))
    loss = outputs.square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss)
print("PEAK", torch.cuda.max_memory_allocated())
