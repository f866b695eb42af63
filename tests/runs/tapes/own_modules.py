"""Modules that no package has, in a file that another process can import."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH = 2048, 128


class Block(nn.Module):
    """Attention by torch's own module, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, stream: Tensor) -> Tensor:
        """The residual stream after the block."""
        normed = self.first(stream)
        stream = stream + self.attention(normed, normed, normed, need_weights=False)[0]
        result: Tensor = stream + self.mlp(self.second(stream))
        return result


class Scores(nn.Module):
    """Scores of all words for each token; head and embedding share their weight."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Of indices of tokens."""
        stream = self.words(tokens)
        for block in self.blocks:
            stream = block(stream)
        scores: Tensor = self.head(stream)
        return scores


class Decoder(Scores):
    """Returns the loss with the scores, as models of transformers do."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        """The loss and the scores."""
        scores = super().forward(input_ids)
        assert labels is not None
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()), scores


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Of every token."""
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def train(kind: str, batch: int, seq: int) -> None:
    """An unchanged loop; prints what torch has allocated and reserved in its third step."""
    own_loss = kind == "own"
    model: nn.Module = (Decoder() if own_loss else Scores()).bfloat16().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(3):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        ids = torch.randint(0, WORDS, (batch, seq), device="cuda")
        result = model(ids, ids)[0] if own_loss else loss(model(ids), ids)
        result.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        result = result.detach()
    print("figures", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
