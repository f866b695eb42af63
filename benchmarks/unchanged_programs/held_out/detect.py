"""Detects objects as a set: queries attend to image features, SciPy matches boxes, then focal and box losses."""

import argparse

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=6)
p.add_argument("--width", type=int, default=256)
p.add_argument("--batch", type=int, default=8)
p.add_argument("--size", type=int, default=640)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
QUERIES, CLASSES = 300, 80


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width, layers = args.width, []
        for inner, outer in ((3, 64), (64, 64), (64, 128), (128, 256), (256, width)):
            layers += [nn.Conv2d(inner, outer, 3, 2, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.places = nn.Parameter(torch.randn(1, (args.size // 32) ** 2, width) * 0.02)
        self.queries = nn.Parameter(torch.randn(1, QUERIES, width))
        options = {"dim_feedforward": 4 * width, "batch_first": True, "norm_first": True}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 8, **options), args.layers, enable_nested_tensor=False
        )
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(width, 8, **options) for _ in range(args.layers))
        self.classes = nn.Linear(width, CLASSES)
        self.boxes = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4), nn.Sigmoid())

    def forward(self, images: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        memory = self.encoder(self.body(images).flatten(2).transpose(1, 2) + self.places)
        h, found = self.queries.expand(len(images), -1, -1), []
        for layer in self.decoder:
            h = layer(h, memory)
            found.append((self.classes(h), self.boxes(h)))
        return found


@torch.no_grad()
def match(logits: torch.Tensor, boxes: torch.Tensor, truth: dict) -> tuple[torch.Tensor, torch.Tensor]:
    cost = torch.cdist(boxes, truth["boxes"], p=1) * 5 - logits.sigmoid()[:, truth["labels"]] * 2
    return tuple(torch.as_tensor(part, device=device) for part in linear_sum_assignment(cost.cpu().numpy()))


def loss_of(logits: torch.Tensor, boxes: torch.Tensor, truths: list[dict]) -> torch.Tensor:
    wanted, distance = torch.zeros_like(logits), logits.new_zeros(())
    for i, truth in enumerate(truths):
        ours, theirs = match(logits[i], boxes[i], truth)
        wanted[i, ours, truth["labels"][theirs]] = 1.0
        distance = distance + F.l1_loss(boxes[i, ours], truth["boxes"][theirs], reduction="sum")
    chances = logits.sigmoid()
    right = chances * wanted + (1 - chances) * (1 - wanted)
    focal = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none") * (1 - right) ** 2
    return (focal.sum() + 5 * distance) / sum(len(truth["labels"]) for truth in truths)


torch.manual_seed(0)
model = Detector().to(device)
slow = [w for name, w in model.named_parameters() if name.startswith("body")]
fast = [w for name, w in model.named_parameters() if not name.startswith("body")]
optimizer = torch.optim.AdamW([{"params": fast}, {"params": slow, "lr": 1e-5}], lr=1e-4, weight_decay=1e-4)
for step in range(4):
    images = torch.randn(args.batch, 3, args.size, args.size).to(device)
    counts = torch.randint(1, 40, (args.batch,)).tolist()
    truths = [{"labels": torch.randint(CLASSES, (n,)).to(device), "boxes": torch.rand(n, 4).to(device)} for n in counts]
    loss = sum(loss_of(logits, boxes, truths) for logits, boxes in model(images))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
