"""Two models with an optimizer each, which train in turns, and a gradient penalty."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 4096)).cuda()
critic = nn.Sequential(nn.Linear(4096, 1024), nn.LeakyReLU(), nn.Linear(1024, 1)).cuda()
optimizers = [torch.optim.Adam(model.parameters(), lr=1e-4) for model in (generator, critic)]
for step in range(10):
    noise, real = torch.randn(1024, 64, device="cuda"), torch.randn(1024, 4096, device="cuda")
    if step % 2:
        loss = -critic(generator(noise)).mean()
    else:
        mixed = (real + generator(noise).detach()).requires_grad_()
        (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        loss = (
            critic(generator(noise).detach()).mean() - critic(real).mean() + (gradient.norm(dim=1) - 1).square().mean()
        )
    loss.backward()
    optimizers[(step + 1) % 2].step()
    for optimizer in optimizers:
        optimizer.zero_grad()
print("PEAK", torch.cuda.max_memory_allocated())
