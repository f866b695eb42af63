"""Each layer compiled in place, as torchtitan does, and the optimizer's step compiled as a function."""

import time

import torch
from torch import nn

torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(512), nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


model = nn.Sequential(nn.Embedding(1000, 512), *(Layer() for _ in range(6)), nn.Linear(512, 1000)).cuda()
for layer in model[1:-1]:
    layer.compile()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(20):
    begin = time.perf_counter()
    tokens = torch.randint(1000, (8, 512), device="cuda")
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    print("STEP", time.perf_counter() - begin)
print("PEAK", torch.cuda.max_memory_allocated())
