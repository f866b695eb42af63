"""A script with torch's memory history, its own snapshot and the profiler; it ends with an exception."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

torch.cuda.memory._record_memory_history(max_entries=100_000)
torch.manual_seed(0)
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), 4).cuda()
optimizer = torch.optim.NAdam(model.parameters())
with profile(
    activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
    schedule=schedule(wait=1, warmup=1, active=2),
    profile_memory=True,
    record_shapes=True,
    with_stack=True,
) as profiler:
    for _ in range(6):
        model(torch.rand(16, 256, 256, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
with tempfile.TemporaryDirectory() as folder:
    torch.cuda.memory._dump_snapshot(str(Path(folder) / "own.pickle"))
torch.cuda.memory._record_memory_history(enabled=None)
print("PEAK", torch.cuda.max_memory_allocated(), flush=True)
raise RuntimeError("the data set is damaged")
