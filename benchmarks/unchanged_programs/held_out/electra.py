"""accelerate pre-trains an ELECTRA: a generator makes tokens, a discriminator judges them; states are saved."""

import argparse
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining, get_scheduler

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=12)
p.add_argument("--width", type=int, default=768)
p.add_argument("--batch", type=int, default=32)
p.add_argument("--seq", type=int, default=256)
args = p.parse_args()
torch.manual_seed(0)
precision = "bf16" if torch.cuda.is_available() else "no"
accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)


def config(width: int) -> ElectraConfig:
    return ElectraConfig(
        embedding_size=args.width,
        hidden_size=width,
        num_hidden_layers=args.layers,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
    )


class Both(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = ElectraForMaskedLM(config(args.width // 2))
        self.discriminator = ElectraForPreTraining(config(args.width))
        self.generator.electra.embeddings.word_embeddings = self.discriminator.electra.embeddings.word_embeddings

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.generator(input_ids=tokens.masked_fill(hidden, 103)).logits
        first = F.cross_entropy(logits.transpose(1, 2), tokens.masked_fill(~hidden, -100))
        with torch.no_grad():
            noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)))
            made = torch.where(hidden, (logits + noise).argmax(-1), tokens)
        return first + 50 * self.discriminator(input_ids=made, labels=(made != tokens).float()).loss


rows = torch.randint(1000, 30000, (8 * args.batch, args.seq))
hidden = torch.rand(rows.shape) < 0.15
loader = DataLoader(list(zip(rows, hidden, strict=True)), args.batch, shuffle=True)
model = Both()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
schedule = get_scheduler("linear", optimizer, 1, 8)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
with tempfile.TemporaryDirectory() as folder:
    for number, (tokens, masks) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(tokens, masks)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if number == 3:
            accelerator.save_state(f"{folder}/state", safe_serialization=False)
            accelerator.load_state(f"{folder}/state")
        accelerator.print(f"batch {number} loss {loss.item():.4f}")
