"""Memory runs out in the third step; the loop catches it and goes on with half of the batch."""

import torch
from torch import nn

torch.cuda.set_per_process_memory_fraction(2 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(12))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
batch, failures = 4096, 0
for step in range(6):
    rows = 2**17 if step == 2 else batch
    while True:
        try:
            model(torch.rand(rows, 1024, device="cuda")).square().mean().backward()
        except torch.OutOfMemoryError:
            failures += 1
            rows //= 2
            optimizer.zero_grad()
        else:
            break
    optimizer.step()
    optimizer.zero_grad()
print("FAILURES", failures)
print("PEAK", torch.cuda.max_memory_allocated())
