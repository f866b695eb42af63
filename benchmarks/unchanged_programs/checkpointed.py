"""torch.utils.checkpoint of either kind around the blocks of an encoder with dropout; fused AdamW, bf16 autocast."""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

p = argparse.ArgumentParser()
p.add_argument("--kind", choices=["reentrant", "plain", "sequential"], default="plain")
p.add_argument("--layers", type=int, default=16)
p.add_argument("--width", type=int, default=1024)
p.add_argument("--batch", type=int, default=16)
p.add_argument("--seq", type=int, default=512)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(80, args.width)
        layers = [
            nn.TransformerEncoderLayer(
                args.width, args.width // 64, 4 * args.width, 0.1, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(args.layers)
        ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(args.width, 5000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        if args.kind == "sequential":
            h = checkpoint_sequential(self.layers, 4, h, use_reentrant=False)
        else:
            for layer in self.layers:
                h = checkpoint(layer, h, use_reentrant=args.kind == "reentrant")
        return self.head(h)


model = Encoder().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for step in range(3):
    x = torch.randn(args.batch, args.seq, 80, device=device)
    y = torch.randint(5000, (args.batch, args.seq), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    accuracy = (logits.argmax(-1) == y).float().mean()
    print(f"step {step} loss {loss.item():.4f} accuracy {accuracy.item():.4f}")
