"""Reinforcement learning: rollouts without gradients, then several epochs over them with a policy and a value model."""

import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 512)).cuda()
value = nn.Sequential(nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 1)).cuda()
optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=1e-4)
for _ in range(3):
    states, actions, worth = [], [], []
    state = torch.rand(256, 512, device="cuda")
    with torch.no_grad():
        for _ in range(64):
            action = torch.distributions.Categorical(logits=policy(state)).sample()
            states.append(state)
            actions.append(action)
            worth.append(value(state).squeeze(-1))
            state = torch.roll(state, 1, dims=1) + 0.01 * torch.randn_like(state)
    seen, done = torch.cat(states), torch.cat(actions)
    advantage = torch.rand_like(torch.cat(worth)) - torch.cat(worth)
    for rows in torch.randperm(len(seen), device="cuda").chunk(2):
        taken = torch.distributions.Categorical(logits=policy(seen[rows])).log_prob(done[rows])
        loss = -(taken * advantage[rows]).mean() + (value(seen[rows]).squeeze(-1) - advantage[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print("PEAK", torch.cuda.max_memory_allocated())
