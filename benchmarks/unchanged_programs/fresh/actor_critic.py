"""Actor and critic with an optimizer each: a rollout on the GPU, advantages, and minibatches of its rows."""

import argparse

import torch
from torch import nn
from torch.distributions import Normal

p = argparse.ArgumentParser()
p.add_argument("--width", type=int, default=512)
p.add_argument("--worlds", type=int, default=1024)
p.add_argument("--steps", type=int, default=32)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
SEEN, ACTIONS = 96, 12


def network(outputs):
    return nn.Sequential(
        *(nn.Linear(SEEN, args.width), nn.LayerNorm(args.width), nn.ELU()),
        *(nn.Linear(args.width, args.width), nn.ELU(), nn.Linear(args.width, outputs)),
    ).to(device)


actor, critic = network(ACTIONS), network(1)
spread = nn.Parameter(torch.zeros(ACTIONS, device=device))
of_actor = torch.optim.Adam([*actor.parameters(), spread], lr=3e-4)
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
moves = torch.randn(ACTIONS, SEEN, device=device) / SEEN
for _ in range(2):
    state = torch.randn(args.worlds, SEEN, device=device)
    buffer = {name: [] for name in ("state", "action", "logp", "reward", "value")}
    with torch.no_grad():
        for _ in range(args.steps):
            policy = Normal(actor(state), spread.exp())
            action = policy.sample()
            row = state, action, policy.log_prob(action).sum(-1), -state.square().mean(-1), critic(state).squeeze(-1)
            for name, value in zip(buffer, row, strict=False):
                buffer[name].append(value)
            state = (0.95 * state + action @ moves).clamp(-5, 5)
        advantage, following, advantages = torch.zeros(args.worlds, device=device), critic(state).squeeze(-1), []
        for reward, value in zip(reversed(buffer["reward"]), reversed(buffer["value"]), strict=False):
            advantage = reward + 0.99 * following - value + 0.99 * 0.95 * advantage
            following = value
            advantages.append(advantage)
        flat = {name: torch.stack(values).flatten(0, 1) for name, values in buffer.items()}
        flat["advantage"] = torch.stack(advantages[::-1]).flatten()
        flat["target"] = flat["advantage"] + flat["value"]
    for _ in range(2):
        for rows in torch.randperm(args.worlds * args.steps, device=device).chunk(4):
            batch = {name: values[rows] for name, values in flat.items()}
            policy = Normal(actor(batch["state"]), spread.exp())
            ratio = (policy.log_prob(batch["action"]).sum(-1) - batch["logp"]).exp()
            gain = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
            loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() - 0.01 * policy.entropy().mean()
            of_actor.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
            of_actor.step()
            of_critic.zero_grad()
            nn.functional.huber_loss(critic(batch["state"]).squeeze(-1), batch["target"]).backward()
            of_critic.step()
    print(loss.item())
