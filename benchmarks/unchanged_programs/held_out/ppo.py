"""PPO with a convolutional policy: roll-outs into buffers on the device, epochs of shuffled pieces."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

p = argparse.ArgumentParser()
p.add_argument("--worlds", type=int, default=256)
p.add_argument("--steps", type=int, default=128)
p.add_argument("--piece", type=int, default=8192)
p.add_argument("--size", type=int, default=84)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inner, outer, kernel, stride in ((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)):
            layers += [nn.Conv2d(inner, outer, kernel, stride), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(512), nn.ReLU())
        self.actions, self.value = nn.Linear(512, 18), nn.Linear(512, 1)

    def forward(self, seen: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        h = self.body(seen.float() / 255)
        return Categorical(logits=self.actions(h)), self.value(h).squeeze(-1)


torch.manual_seed(0)
model = Policy().to(device)
shape = (4, args.size, args.size)
model(torch.zeros(1, *shape, device=device))
optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4, eps=1e-5)
screens = torch.empty(args.steps, args.worlds, *shape, dtype=torch.uint8, device=device)
chosen = torch.empty(args.steps, args.worlds, dtype=torch.long, device=device)
odds, values, rewards = (torch.empty(args.steps, args.worlds, device=device) for _ in range(3))
for update in range(3):
    for step in range(args.steps):
        screens[step] = torch.randint(256, (args.worlds, *shape), dtype=torch.uint8).to(device)
        with torch.no_grad():
            choice, values[step] = model(screens[step])
            chosen[step] = choice.sample()
            odds[step] = choice.log_prob(chosen[step])
        rewards[step] = torch.rand(args.worlds, device=device)
    gains, running = torch.zeros_like(rewards), torch.zeros(args.worlds, device=device)
    for step in reversed(range(args.steps - 1)):
        surprise = rewards[step] + 0.99 * values[step + 1] - values[step]
        gains[step] = running = surprise + 0.99 * 0.95 * running
    flat = [x.flatten(0, 1) for x in (screens, chosen, odds, values + gains, gains)]
    for _ in range(2):
        for index in torch.randperm(args.steps * args.worlds, device=device).split(args.piece):
            seen, action, before, target, gain = (x[index] for x in flat)
            choice, value = model(seen)
            ratio = (choice.log_prob(action) - before).exp()
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            first = -torch.min(ratio * gain, ratio.clamp(0.9, 1.1) * gain).mean()
            loss = first + 0.5 * F.mse_loss(value, target) - 0.01 * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    print(f"update {update} loss {loss.item():.4f}")
