"""Another process evaluates a checkpoint on the same device while training goes on; ends with sys.exit(3)."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

EVALUATION = """
import sys, torch
from torch import nn
model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
model.load_state_dict(torch.load(sys.argv[1], weights_only=True))
model.eval()
with torch.no_grad():
    print("EVALUATED", model(torch.rand(4096, 1024, device="cuda")).mean().isfinite().item())
"""
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.Adam(model.parameters())
with tempfile.TemporaryDirectory() as folder:
    for step in range(6):
        model(torch.rand(2048, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 1:
            path = Path(folder) / f"{step}.pt"
            torch.save(model.state_dict(), path)
            subprocess.run([sys.executable, "-c", EVALUATION, str(path)], check=True)
print("PEAK", torch.cuda.max_memory_allocated(), flush=True)
sys.exit(3)
