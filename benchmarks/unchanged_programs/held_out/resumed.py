"""BLOOM in a plain loop: evaluation, saving and reading back of model and optimizer on the device, then more steps."""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import BloomConfig, BloomForCausalLM, get_linear_schedule_with_warmup

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=12)
p.add_argument("--width", type=int, default=1024)
p.add_argument("--batch", type=int, default=6)
p.add_argument("--seq", type=int, default=512)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = BloomConfig(hidden_size=args.width, n_layer=args.layers, n_head=args.width // 64, vocab_size=65536)


def start() -> tuple[BloomForCausalLM, torch.optim.Optimizer]:
    model = BloomForCausalLM(config).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0.1)


def run(model: BloomForCausalLM, batch: int) -> torch.Tensor:
    tokens = torch.randint(config.vocab_size, (batch, args.seq)).to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss


model, optimizer = start()
with tempfile.TemporaryDirectory() as folder:
    for part in range(2):
        schedule = get_linear_schedule_with_warmup(optimizer, 1, 4)
        model.train()
        for _ in range(2):
            loss = run(model, args.batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            held = torch.stack([run(model, 2 * args.batch) for _ in range(2)]).mean().exp()
        print(f"part {part} loss {loss.item():.4f} perplexity {held.item():.1f}")
        if part == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder) / "last.pt")
            del model, optimizer, schedule
            model, optimizer = start()
            saved = torch.load(Path(folder) / "last.pt", map_location=device)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            del saved
