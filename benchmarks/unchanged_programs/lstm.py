"""An LSTM language model with truncated backpropagation through time: the state goes from piece to piece."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--width", type=int, default=1024)
p.add_argument("--layers", type=int, default=3)
p.add_argument("--batch", type=int, default=64)
p.add_argument("--piece", type=int, default=128)
p.add_argument("--vocabulary", type=int, default=20000)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(args.vocabulary, args.width)
        self.rnn = nn.LSTM(args.width, args.width, args.layers, dropout=0.2, batch_first=True)
        self.head = nn.Linear(args.width, args.vocabulary)

    def forward(self, tokens: torch.Tensor, state):
        h, state = self.rnn(F.dropout(self.embed(tokens), 0.2, self.training), state)
        return self.head(h), state


model = Model().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
text = torch.randint(args.vocabulary, (args.batch, 5 * args.piece + 1))
state = None
for start in range(0, 5 * args.piece, args.piece):
    x = text[:, start : start + args.piece].to(device)
    y = text[:, start + 1 : start + 1 + args.piece].to(device)
    if state is not None:
        state = tuple(part.detach() for part in state)
    logits, state = model(x, state)
    loss = F.cross_entropy(logits.reshape(-1, args.vocabulary), y.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    print(start, loss.item())
