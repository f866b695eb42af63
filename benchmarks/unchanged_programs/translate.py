"""nn.Transformer translates: masks for padding, label smoothing, Noam's schedule, then greedy decoding of a batch."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=6)
p.add_argument("--width", type=int, default=512)
p.add_argument("--batch", type=int, default=64)
p.add_argument("--seq", type=int, default=160)
p.add_argument("--vocabulary", type=int, default=16000)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(args.vocabulary, args.width), nn.Embedding(args.vocabulary, args.width)
        self.register_buffer("places", torch.randn(args.seq + 1, args.width) * 0.02)
        self.inside = nn.Transformer(
            args.width, args.width // 64, args.layers, args.layers, 4 * args.width, 0.1, batch_first=True
        )
        self.head = nn.Linear(args.width, args.vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        h = self.inside(
            self.source(source) + self.places[: source.shape[1]],
            self.target(target) + self.places[: target.shape[1]],
            tgt_mask=mask,
            src_key_padding_mask=source == 0,
            tgt_key_padding_mask=torch.zeros_like(target, dtype=mask.dtype).masked_fill(target == 0, float("-inf")),
            memory_key_padding_mask=source == 0,
            tgt_is_causal=True,
        )
        return self.head(h)


def padded(count: int) -> torch.Tensor:
    lengths = torch.randint(args.seq // 2, args.seq + 1, (count,))
    lengths[0] = args.seq
    tokens = torch.randint(1, args.vocabulary, (count, args.seq))
    return tokens * (torch.arange(args.seq)[None] < lengths[:, None])


model = Translator().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: args.width**-0.5 * (i + 1) * 4000**-1.5)
for step in range(4):
    source, target = padded(args.batch).to(device), padded(args.batch).to(device)
    logits = model(source, target[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    print(f"step {step} loss {loss.item():.4f}")
model.train(mode=False)
with torch.no_grad():
    target = torch.ones(args.batch, 1, dtype=torch.long, device=device)
    for _ in range(8):
        target = torch.cat([target, model(source, target)[:, -1].argmax(-1, keepdim=True)], dim=1)
print("decoded", tuple(target.shape))
