"""A graph network: messages along edges by index_add_, sums per graph by scatter; each batch has another size."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--nodes", type=int, default=60_000)
p.add_argument("--degree", type=int, default=12)
p.add_argument("--width", type=int, default=128)
p.add_argument("--layers", type=int, default=4)
args = p.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
GRAPHS = 64


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width + 16, width), nn.SiLU(), nn.Linear(width, width))
        self.weight = nn.Linear(width, 1)
        self.update, self.norm = nn.GRUCell(width, width), nn.LayerNorm(width)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        source, target = edges
        messages = self.message(torch.cat([nodes[source], nodes[target], features], 1))
        messages = messages * self.weight(messages).sigmoid()
        gathered = torch.zeros_like(nodes).index_add_(0, target, messages)
        count = torch.zeros(len(nodes), 1, device=nodes.device)
        count.index_add_(0, target, torch.ones(len(target), 1, device=nodes.device))
        return self.norm(self.update(gathered / count.clamp(min=1), nodes))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.atoms, self.bonds = nn.Embedding(100, args.width), nn.Embedding(20, 16)
        self.layers = nn.ModuleList(Layer(args.width) for _ in range(args.layers))
        self.head = nn.Sequential(nn.Linear(args.width, args.width), nn.SiLU(), nn.Linear(args.width, 1))

    def forward(
        self, atoms: torch.Tensor, edges: torch.Tensor, bonds: torch.Tensor, graph: torch.Tensor
    ) -> torch.Tensor:
        nodes, features = self.atoms(atoms), self.bonds(bonds)
        for layer in self.layers:
            nodes = layer(nodes, edges, features)
        index = graph[:, None].expand_as(nodes)
        pooled = torch.zeros(GRAPHS, nodes.shape[1], device=nodes.device).scatter_add(0, index, nodes)
        return self.head(pooled).squeeze(1)


torch.manual_seed(0)
model = Network().to(device)
optimizer = torch.optim.Adamax(model.parameters(), lr=2e-3)
for step in range(6):
    count = args.nodes - step % 3 * args.nodes // 5
    edges = torch.randint(count, (2, count * (args.degree - step % 2))).to(device)
    atoms, bonds = torch.randint(100, (count,)).to(device), torch.randint(20, (edges.shape[1],)).to(device)
    graph = torch.randint(GRAPHS, (count,)).sort().values.to(device)
    loss = F.l1_loss(model(atoms, edges, bonds, graph), torch.randn(GRAPHS, device=device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} nodes {count} loss {loss.item():.4f}")
