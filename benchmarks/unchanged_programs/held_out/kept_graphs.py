"""Losses are kept with their graphs for a later average, with 9 GiB: memory runs out after some steps."""

import torch
import torch.nn.functional as F
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
if device == "cuda":
    torch.cuda.set_per_process_memory_fraction(9 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
batch, width, steps = (48, 96, 40) if device == "cuda" else (2, 8, 3)
layers: list[nn.Module] = [nn.Conv1d(80, width, 5, padding=2)]
for _ in range(8):
    layers += [nn.BatchNorm1d(width), nn.Hardswish(), nn.Conv1d(width, width, 5, padding=2)]
model = nn.Sequential(*layers, nn.Conv1d(width, 1, 1)).to(device)
optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)
losses = []
for step in range(steps):
    speech = torch.randn(batch, 80, 3000 if device == "cuda" else 50, device=device)
    loss = F.smooth_l1_loss(model(speech), speech.mean(1, keepdim=True))
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss)
    print(f"step {step} average {torch.stack(losses).mean().item():.4f}", flush=True)
