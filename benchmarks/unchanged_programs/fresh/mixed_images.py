"""A vision transformer of transformers with mixup and soft targets, bf16 autocast, clipping, and a cosine schedule."""

import argparse

import torch
import torch.nn.functional as F
from transformers import ViTConfig, ViTForImageClassification

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=10)
p.add_argument("--width", type=int, default=512)
p.add_argument("--size", type=int, default=224)
p.add_argument("--batch", type=int, default=48)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = ViTConfig(
    hidden_size=args.width,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 64,
    intermediate_size=4 * args.width,
    image_size=args.size,
    num_labels=100,
    hidden_dropout_prob=0.1,
)
model = ViTForImageClassification(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda")
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
for _ in range(4):
    images = torch.randn(args.batch, 3, args.size, args.size).to(device, non_blocking=True)
    labels = torch.randint(0, 100, (args.batch,)).to(device, non_blocking=True)
    part = torch.distributions.Beta(0.8, 0.8).sample().item()
    order = torch.randperm(args.batch, device=device)
    mixed = part * images + (1 - part) * images[order]
    target = part * F.one_hot(labels, 100) + (1 - part) * F.one_hot(labels[order], 100)
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = model(pixel_values=mixed).logits
        loss = -(target * F.log_softmax(logits.float(), dim=-1)).sum(dim=-1).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    print(loss.item())
