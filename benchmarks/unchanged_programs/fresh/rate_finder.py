"""A learning rate is searched: weights and optimizer are copied, rates rise, then both are restored to train."""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

p = argparse.ArgumentParser()
p.add_argument("--width", type=int, default=2048)
p.add_argument("--layers", type=int, default=8)
p.add_argument("--batch", type=int, default=512)
args = p.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.mish(self.up(self.norm(x))))


model = nn.Sequential(
    nn.Linear(256, args.width), *(Residual(args.width) for _ in range(args.layers)), nn.Linear(args.width, 1)
)
model.to(device)
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-6, weight_decay=1e-2)
data = TensorDataset(torch.randn(8 * args.batch, 256), torch.randn(8 * args.batch, 1))
loader = DataLoader(data, args.batch, shuffle=True, pin_memory=device.type == "cuda")


def step(batch):
    x, y = (part.to(device, non_blocking=True) for part in batch)
    loss = F.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
rates, losses = torch.logspace(-6, -2, 5).tolist(), []
for rate, batch in zip(rates, loader, strict=False):
    for group in optimizer.param_groups:
        group["lr"] = rate
    losses.append(step(batch))
best = rates[int(torch.stack(losses).argmin())]
model.load_state_dict(before[0])
optimizer.load_state_dict(before[1])
for group in optimizer.param_groups:
    group["lr"] = best
for batch in loader:
    step(batch)
print(best)
