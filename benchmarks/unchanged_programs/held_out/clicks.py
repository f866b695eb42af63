"""Predicts clicks: sparse tables on the device, SparseAdam and Adagrad, batches copied ahead on a side stream."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--tables", type=int, default=8)
p.add_argument("--rows", type=int, default=500_000)
p.add_argument("--width", type=int, default=64)
p.add_argument("--batch", type=int, default=32768)
p.add_argument("--steps", type=int, default=6)
args = p.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DENSE, PER_TABLE = 64, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = args.width
        self.tables = nn.ModuleList(nn.EmbeddingBag(args.rows, width, sparse=True) for _ in range(args.tables))
        self.dense = nn.Sequential(nn.Linear(DENSE, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = (args.tables + 1) * args.tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU())
        self.out = nn.Linear(512, 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        first = self.dense(dense)
        parts = torch.stack([first, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        products = parts @ parts.transpose(1, 2)
        rows, columns = torch.tril_indices(parts.shape[1], parts.shape[1], -1, device=dense.device)
        return self.out(self.top(torch.cat([first, products[:, rows, columns]], 1))).squeeze(1)


def host_batches():
    for _ in range(args.steps):
        batch = (
            torch.randn(args.batch, DENSE),
            torch.randint(args.rows, (args.batch, args.tables, PER_TABLE)),
            torch.rand(args.batch).round(),
        )
        yield [part.pin_memory() for part in batch] if device.type == "cuda" else batch


def ahead(batches):
    """Yields batches on the device; the next one is already being copied."""
    if device.type != "cuda":
        yield from batches
        return
    copies, waiting = torch.cuda.Stream(), None
    for batch in batches:
        with torch.cuda.stream(copies):
            moved = [part.to(device, non_blocking=True) for part in batch]
        done = copies.record_event()
        if waiting is not None:
            yield waiting
        torch.cuda.current_stream().wait_event(done)
        for part in moved:
            part.record_stream(torch.cuda.current_stream())
        waiting = moved
    yield waiting


torch.manual_seed(0)
model = Model().to(device)
optimizers = [
    torch.optim.SparseAdam(model.tables.parameters(), lr=1e-3),
    torch.optim.Adagrad([w for name, w in model.named_parameters() if not name.startswith("tables")], lr=1e-2),
]
for step, (dense, sparse, clicked) in enumerate(ahead(host_batches())):
    loss = F.binary_cross_entropy_with_logits(model(dense, sparse), clicked)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
