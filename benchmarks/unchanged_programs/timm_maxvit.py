"""timm's MaxViT with checkpoints under fp16 autocast, mixed images and timm's own optimizer."""

import argparse

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2

p = argparse.ArgumentParser()
p.add_argument("--model", default="maxvit_tiny_rw_224")
p.add_argument("--batch", type=int, default=24)
args = p.parse_args()
torch.manual_seed(0)
model = timm.create_model(args.model, num_classes=1000, drop_path_rate=0.1).cuda()
model.set_grad_checkpointing()
optimizer, scaler = create_optimizer_v2(model, opt="nadamw", lr=1e-4), torch.amp.GradScaler()
mix, loss_of = Mixup(mixup_alpha=0.8, cutmix_alpha=0.0, num_classes=1000), SoftTargetCrossEntropy()
for step in range(3):
    images, labels = torch.randn(args.batch, 3, 224, 224).cuda(), torch.randint(0, 1000, (args.batch,)).cuda()
    images, targets = mix(images, labels)
    with torch.autocast("cuda", torch.float16):
        loss = loss_of(model(images), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
