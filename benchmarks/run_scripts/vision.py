"""A vision transformer under float16 autocast with a gradient scaler and an exponential moving average."""

import copy

import torch
from torch.amp import GradScaler
from transformers import ViTConfig, ViTForImageClassification

torch.manual_seed(0)
model = ViTForImageClassification(ViTConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=6)).cuda()
average = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
optimizer, scaler = torch.optim.AdamW(model.parameters()), GradScaler()
for _ in range(6):
    images, labels = torch.rand(32, 3, 224, 224, device="cuda"), torch.randint(2, (32,), device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(pixel_values=images, labels=labels).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    for kept, weight in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        kept.lerp_(weight, 0.01)
with torch.inference_mode():
    average(pixel_values=torch.rand(128, 3, 224, 224, device="cuda"))
print("PEAK", torch.cuda.max_memory_allocated())
