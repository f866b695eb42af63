from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor

from ligerprof.gpus import find_gpu
from ligerprof.recipe.categories import Optimizer
from ligerprof.runs.training import MuonWithAdamW
from ligerprof.torch_memory.dtypes import highest_moment
from ligerprof.torch_memory.low_bit import eight_bit_state_sizes
from ligerprof.torch_memory.optimizers import OPTIMIZERS, OptimizedTensor

H200 = find_gpu("h200")


def tensor(*shape: int, width: int = 4, in_layer: bool = True) -> OptimizedTensor:
    elements = torch.Size(shape).numel()
    return OptimizedTensor(shape=shape, elements=elements, width=width, in_layer=in_layer, galore_rank=8)


class SmallModel(torch.nn.Module):
    """Names as in a decoder: a matrix and a vector in a layer, and an embedding."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(33, 8, dtype=dtype)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 24, dtype=dtype)])


def make(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    match name:
        case "adamw":
            return torch.optim.AdamW(parameters, foreach=False)
        case "adamw-foreach":
            return torch.optim.AdamW(parameters, foreach=True)
        case "adamw-fused":
            return torch.optim.AdamW(parameters, fused=True)
        case "adafactor":
            return torch.optim.Adafactor(parameters, foreach=False)
        case "sgd":
            return torch.optim.SGD(parameters)
        case "sgd-momentum":
            return torch.optim.SGD(parameters, momentum=0.9)
        case "adafactor-hf":
            return Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)
        case "muon":
            return MuonWithAdamW(model, 1e-3)
    raise AssertionError(name)


def states_of(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, *, counts: bool) -> list[int]:
    """Bytes of a parameter's states, with the step counter if it is on the GPU."""
    parts: list[Any] = [optimizer, *getattr(optimizer, "_parts", [])]
    states = [state for part in parts if parameter in part.state for state in part.state[parameter].items()]
    return sorted(
        value.numel() * value.element_size()
        for key, value in states
        if torch.is_tensor(value) and (counts or key != "step")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["adamw", "adamw-foreach", "adamw-fused", "adafactor", "adafactor-hf", "sgd", "sgd-momentum", "muon"]
)
def test_states_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    model = SmallModel(dtype)
    optimizer = make(name, model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for own, parameter in model.named_parameters():
        described = tensor(*parameter.shape, width=parameter.element_size(), in_layer="layers" in own)
        expected = sorted(OPTIMIZERS[name].states(described))
        assert states_of(optimizer, parameter, counts=name in ("adamw-fused", "muon")) == expected, own


def test_every_optimizer_has_a_row() -> None:
    assert set(OPTIMIZERS) == set(Optimizer.choices())
    assert all((row.moments is None) == bool(row.label) for row in OPTIMIZERS.values())


def test_large_states_of_paged_optimizers_are_outside_torch() -> None:
    small, large = tensor(99_999), tensor(100, 1000)
    whole, eight_bit = OPTIMIZERS["paged-adamw"], OPTIMIZERS["paged-adamw-8bit"]
    assert (whole.states(small), whole.paged(small)) == ((399_996, 399_996), 0)
    assert (whole.states(large), whole.paged(large)) == ((), 800_000)
    assert (eight_bit.states(small), eight_bit.paged(small)) == (eight_bit_state_sizes(99_999), 0)
    # one fp32 scale for each 256 elements of each moment stays
    assert (eight_bit.states(large), eight_bit.paged(large)) == ((391 * 4, 391 * 4), 200_000)


def test_lion_keeps_one_moment_in_fp32() -> None:
    assert OPTIMIZERS["lion"].states(tensor(10, 10, width=2)) == (400,)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # square root and denominator, and the previous denominator
        ("adamw", [4000, 4000, 400]),
        ("adamw-foreach", [400, 4000, 200]),
        # the variance next to means of rows and columns; the squares and the update of the vector before
        ("adafactor", [4000, 40, 400, 400, 400]),
        # the update, two iterates in bf16, two Gram matrices of the shorter side
        ("muon", [4000, 2000, 2000, 200, 200]),
        # the squares and the update of the matrix, and roots of means of rows and columns
        ("adafactor-hf", [4000, 4000, 40, 400]),
        ("sgd", []),
        ("sgd-momentum", []),
        ("lion", []),
    ],
)
def test_temporaries_of_a_step_at_its_highest_moment(name: str, sizes: list[int]) -> None:
    tensors = [tensor(100), tensor(10, 100), tensor(50)]
    assert sorted(highest_moment(OPTIMIZERS[name].update(tensors, H200))) == sorted(sizes)


def test_without_parameters_a_step_takes_nothing() -> None:
    assert all(sum(row.update([], H200)) == sum(row.creation([], H200)) == 0 for row in OPTIMIZERS.values())
