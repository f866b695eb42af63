"""Image models of timm: bfloat16, channels last, its schedule, optimizers and random erasing, validation after."""

import argparse

import timm
import torch
from timm.data.random_erasing import RandomErasing
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

p = argparse.ArgumentParser()
p.add_argument("--model", default="efficientnet_b3")
p.add_argument("--optimizer", default="rmsproptf")
p.add_argument("--batch", type=int, default=48)
p.add_argument("--size", type=int, default=288)
p.add_argument("--checkpoints", action="store_true")
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = timm.create_model(args.model, num_classes=200, drop_rate=0.2, drop_path_rate=0.2)
model = model.to(device, memory_format=torch.channels_last)
model.set_grad_checkpointing(args.checkpoints)
optimizer = create_optimizer_v2(model, opt=args.optimizer, lr=1e-3, weight_decay=1e-5, layer_decay=0.8)
schedule = CosineLRScheduler(optimizer, t_initial=4, warmup_t=1, t_in_epochs=False)
erase, criterion = RandomErasing(0.25, mode="pixel", device=device), LabelSmoothingCrossEntropy()
for step in range(4):
    images = torch.randn(args.batch, 3, args.size, args.size).to(device)
    images = erase(images).to(memory_format=torch.channels_last)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = criterion(model(images), torch.randint(200, (args.batch,), device=device))
    loss.backward()
    timm.utils.dispatch_clip_grad(model.parameters(), 0.02, mode="agc")
    optimizer.step()
    optimizer.zero_grad()
    schedule.step_update(step + 1)
    print(f"step {step} loss {loss.item():.4f}")
model.eval()
with torch.inference_mode(), torch.autocast(device, dtype=torch.bfloat16):
    images = torch.randn(2 * args.batch, 3, args.size, args.size, device=device)
    best = model(images).topk(5).indices
print(best.float().mean().item())
