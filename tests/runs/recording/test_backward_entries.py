"""With hooks at few autograd nodes, backward has the same modules as with a hook at each node."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ligerprof.roles import Phase
from ligerprof.runs.recording.phases import LoopPhases
from tests.kernels.models import batch, tiny_model
from tests.runs.recording.operations import OperationHistory
from tests.sampling import sampled

Step = Callable[[], Tensor]
DRAWN_MODELS = 40


class Drawn(nn.Module):
    """A module that mixes its own operations, in any order, with calls of random modules."""

    def __init__(self, draw: random.Random, depth: int) -> None:
        super().__init__()
        self.program: list[tuple[str, int]] = []
        self.inner = nn.ModuleList()
        for _ in range(draw.randint(1, 5)):
            kind = draw.choice(["own", "side", "join", "call", "call", "repeat", "checkpoint"])
            if kind in ("call", "checkpoint"):
                deeper = depth > 0 and draw.random() < 0.5
                self.inner.append(Drawn(draw, depth - 1) if deeper else nn.Linear(4, 4, bias=draw.random() < 0.5))
            elif kind == "repeat" and not len(self.inner):
                continue
            self.program.append((kind, draw.randrange(max(len(self.inner), 1))))

    def forward(self, x: Tensor) -> Tensor:
        """Run the operations in their order."""
        side, calls = x, iter(self.inner)
        for kind, number in self.program:
            if kind == "own":
                x = torch.sin(x)
            elif kind == "side":
                side = functional.silu(x)
            elif kind == "join":
                x = x * side
            elif kind == "call":
                x = next(calls)(x)
            elif kind == "repeat":
                x = self.inner[min(number, len(self.inner) - 1)](side) + x
            else:
                x = checkpoint(next(calls), x, use_reentrant=False)
        return x


def drawn(seed: int) -> tuple[nn.Module, Step]:
    draw = random.Random(seed)
    model, other = Drawn(draw, 2), Drawn(draw, 1)
    # a batch of few tokens, and what a loop computes before, between and after two models
    batch = torch.randn(2, 4)

    def loss() -> Tensor:
        hidden = model(torch.cos(batch.clone().requires_grad_()))
        between = torch.tanh(hidden)
        return torch.cosh(other(hidden) + between).mean()

    return nn.ModuleList([model, other]), loss


def transformer(family: str, *, checkpointing: bool) -> tuple[nn.Module, Step]:
    model = tiny_model(family)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = model(**batch(model)).loss
        return found

    return model, loss


def modules_in_backward(model: nn.Module, loss: Step, *, names_all_nodes: bool) -> list[tuple[str, str]]:
    """Operation and module of each allocation in backward of the third and the fourth step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with OperationHistory() as history:
        history.start()
        loop = LoopPhases(history.stamp, names_all_nodes=names_all_nodes)
        loop.open()
        for _ in range(4):
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
        loop.close()
    return [
        (operation, stamp.module)
        for operation, stamp in history.operations
        if stamp is not None and stamp.step > 2 and stamp.phase is Phase.BACKWARD
    ]


@sampled("seed", range(DRAWN_MODELS), every=3)
def test_each_operation_of_backward_has_the_module_that_hooks_on_all_nodes_give(seed: int) -> None:
    torch.manual_seed(seed)
    model, loss = drawn(seed)
    if not any(weight.requires_grad for weight in model.parameters()):
        return

    with_all = modules_in_backward(model, loss, names_all_nodes=True)

    assert with_all
    assert modules_in_backward(model, loss, names_all_nodes=False) == with_all


@pytest.mark.parametrize(("family", "checkpointing"), [("llama", False), ("llama", True), ("gpt2", False)])
def test_transformers_have_the_modules_that_hooks_on_all_nodes_give(family: str, checkpointing: bool) -> None:
    model, loss = transformer(family, checkpointing=checkpointing)

    with_all = modules_in_backward(model, loss, names_all_nodes=True)

    assert len({module for _, module in with_all}) > 20
    assert modules_in_backward(model, loss, names_all_nodes=False) == with_all
