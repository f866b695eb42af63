"""A whole training step captured in a CUDA graph and replayed."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
batch = torch.rand(1024, 512, device="cuda")


def step() -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
for _ in range(10):
    graph.replay()
torch.cuda.synchronize()
print("PEAK", torch.cuda.max_memory_allocated())
