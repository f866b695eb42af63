"""Lightning Fabric around a loop of one's own: CodeGen in bf16-mixed, accumulation without sync, saving at the end."""

import argparse
import tempfile

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset
from transformers import CodeGenConfig, CodeGenForCausalLM

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=12)
p.add_argument("--width", type=int, default=1024)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=768)
args = p.parse_args()
fabric = Fabric(accelerator="auto", devices=1, precision="bf16-mixed")
fabric.seed_everything(7)
fabric.launch()
config = CodeGenConfig(n_embd=args.width, n_layer=args.layers, n_head=args.width // 64, rotary_dim=32, vocab_size=51200)
with fabric.init_module():
    model = CodeGenForCausalLM(config)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1))
data = TensorDataset(torch.randint(config.vocab_size, (8 * args.batch, args.seq)))
model.train()
for number, (tokens,) in enumerate(fabric.setup_dataloaders(DataLoader(data, args.batch))):
    going_on = number % 2 == 0
    with fabric.no_backward_sync(model, enabled=going_on):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        fabric.backward(loss / 2)
    if going_on:
        continue
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    fabric.print(f"batch {number} loss {loss.item():.4f}")
with tempfile.TemporaryDirectory() as folder:
    fabric.save(f"{folder}/state.ckpt", {"model": model, "optimizer": optimizer})
