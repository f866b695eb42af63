"""timm's ConvNeXt with its optimizers, mixup, an average of the weights and clipping, under fp16 autocast."""

import argparse

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, NativeScaler

p = argparse.ArgumentParser()
p.add_argument("--model", default="convnext_tiny")
p.add_argument("--batch", type=int, default=64)
args = p.parse_args()
torch.manual_seed(0)
model = timm.create_model(args.model, num_classes=1000, drop_path_rate=0.1).cuda().to(memory_format=torch.channels_last)
average, scaler, mixup = ModelEmaV3(model, decay=0.99), NativeScaler(), Mixup(0.8, 1.0, num_classes=1000)
optimizer, criterion = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05), SoftTargetCrossEntropy()
for step in range(4):
    images = torch.randn(args.batch, 3, 224, 224, device="cuda").contiguous(memory_format=torch.channels_last)
    images, labels = mixup(images, torch.randint(1000, (args.batch,), device="cuda"))
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(images), labels)
    optimizer.zero_grad()
    scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    average.update(model)
    print(f"step {step} loss {loss.item():.4f}")
model.eval()
with torch.no_grad():
    print(average(images).argmax(-1).float().mean().item())
