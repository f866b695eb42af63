"""With 5 GiB the batch does not fit: torch.OutOfMemoryError is caught, the batch halved and split until it does."""

import gc

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
if device == "cuda":
    torch.cuda.set_per_process_memory_fraction(5 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
width, rows = (2048, 16384) if device == "cuda" else (64, 64)
layer = nn.TransformerEncoderLayer(width // 2, 16, 2 * width, 0.0, "gelu", batch_first=True)
model = nn.Sequential(nn.Linear(256, width // 2), nn.TransformerEncoder(layer, 8), nn.Linear(width // 2, 256)).to(
    device
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
batch = rows // 128
for step in range(4):
    x = torch.randn(rows // 128, 128, 256, device=device)
    while True:
        out_of_memory = False
        try:
            for piece in x.split(batch):
                loss = (model(piece) - piece).square().mean() * len(piece) / len(x)
                loss.backward()
        except torch.OutOfMemoryError:
            out_of_memory = True
        if not out_of_memory:
            break
        loss, batch = None, batch // 2
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        print("batch is now", batch, flush=True)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} batch {batch} loss {loss.item():.4f}", flush=True)
