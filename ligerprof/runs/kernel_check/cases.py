"""What a check calls a kernel with: operations, sizes, dtypes and layouts of the inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ligerprof.runs.bench.operations import DTYPES, OPERATIONS, Maker, Operation, Tensors
from ligerprof.runs.bench.shapes import BenchShape, shape_of_model

Layout = Callable[[Tensor], Tensor]

EVEN = BenchShape(
    name="even", sequences=2, seq_len=4, hidden=64, intermediate=128, vocab=256, heads=4, kv_heads=2, head_dim=16
)
ODD = BenchShape(
    name="odd", sequences=3, seq_len=3, hidden=40, intermediate=72, vocab=101, heads=3, kv_heads=1, head_dim=12
)
# without data
LARGE = shape_of_model("llama3.2-1b", name="large", sequences=4, seq_len=1024)
_IGNORED = -100
_LABELS = "labels"
# inputs that the model itself computes: no two elements share memory
_OVERWRITTEN = frozenset({"queries", "keys", "logits"})
PARAMETERS = frozenset({"weight", "bias"})
_STATES = frozenset({"hidden", "residual", "gate", "up"}) | _OVERWRITTEN


def _with_linear(alone: Operation) -> Operation:
    """A gated activation with the linear layer after it."""

    def make(shape: BenchShape, maker: Maker) -> Tensors:
        weight = maker.normal(shape.hidden, shape.intermediate, std=shape.intermediate**-0.5)
        return {**alone.make(shape, maker), "weight": weight}

    return replace(
        alone,
        name=f"{alone.name}_linear",
        wants=("gate", "up", "weight"),
        make=make,
        output_sizes=lambda shape: ((shape.sequences, shape.seq_len, shape.hidden),),
        arguments=lambda given, _: (given["gate"], given["up"], given["weight"]),
        moved={},
    )


CHECKED: Mapping[str, Operation] = {
    **OPERATIONS,
    **{f"{name}_linear": _with_linear(OPERATIONS[name]) for name in ("swiglu", "geglu")},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call.

    Attributes:
        layout: makes the tensor that the kernel gets from a leaf that holds its values.
        expands: whether the leaf has one sequence or token, which the layout repeats without a copy.
        freezes: whether weights and biases want no gradient.
        retains: whether backward runs twice on one graph; the second run's gradients are compared.
        gradient_layout: makes the gradients that backward receives from ones with their values.
        dynamic: whether the kernel is compiled for sizes that change.
    """

    check: str
    title: str
    shape: BenchShape
    dtype: str
    layout: Layout
    expands: bool = False
    freezes: bool = False
    retains: bool = False
    gradient_layout: Layout = torch.clone
    dynamic: bool | None = None

    def skip_reason(self, operation: Operation) -> str | None:
        """Why the operation has no such call, or None."""
        if self.expands and not _OVERWRITTEN.isdisjoint(operation.wants):
            return "the kernel may write over these inputs"
        if self.freezes and not (PARAMETERS & set(operation.wants)):
            return "the operation has no weight"
        return None

    def wanted(self, operation: Operation) -> tuple[str, ...]:
        """Names of the inputs that need a gradient."""
        return tuple(name for name in operation.wants if not (self.freezes and name in PARAMETERS))

    def make(self, operation: Operation, device: torch.device) -> tuple[Tensors, Tensors]:
        """Leaves by name, and the tensors that the kernel gets."""
        maker = Maker(dtype=DTYPES[self.dtype], generator=torch.Generator(device).manual_seed(0))
        leaves = operation.make(self.shape, maker)
        if _LABELS in leaves:
            leaves[_LABELS][::5] = _IGNORED
        if self.expands:
            leaves = {name: value[:1] if name in _STATES else value for name, value in leaves.items()}
        leaves = {name: value.clone().requires_grad_(name in self.wanted(operation)) for name, value in leaves.items()}
        return leaves, self.arranged(leaves)

    def arranged(self, leaves: Tensors) -> Tensors:
        """The tensors that the kernel gets, made of leaves that keep their values."""

        def arrange(name: str, value: Tensor) -> Tensor:
            if name not in _STATES:
                return value
            if self.expands:
                sizes = self.shape.sequences if value.dim() > 2 else self.shape.tokens
                return value.clone().expand(sizes, *value.shape[1:])
            return self.layout(value)

        return {name: arrange(name, value) for name, value in leaves.items()}


def _transposed(value: Tensor) -> Tensor:
    return value.transpose(-1, -2).contiguous().transpose(-1, -2)


def _strided(value: Tensor) -> Tensor:
    return torch.stack((value, value), dim=-1)[..., 0]


CASES = (
    *(Case(check="values", title=dtype, shape=EVEN, dtype=dtype, layout=torch.clone) for dtype in DTYPES),
    Case(check="values", title="fp32, odd sizes", shape=ODD, dtype="fp32", layout=torch.clone),
    Case(check="gradients", title="frozen weights", shape=EVEN, dtype="fp32", layout=torch.clone, freezes=True),
    Case(check="gradients", title="two backward passes", shape=EVEN, dtype="fp32", layout=torch.clone, retains=True),
    Case(
        check="gradients",
        title="every second element",
        shape=EVEN,
        dtype="fp32",
        layout=torch.clone,
        gradient_layout=_strided,
    ),
    Case(check="strides", title="transposed", shape=EVEN, dtype="fp32", layout=_transposed),
    Case(check="strides", title="every second element", shape=EVEN, dtype="fp32", layout=_strided),
    Case(check="strides", title="expanded", shape=EVEN, dtype="fp32", layout=torch.clone, expands=True),
    Case(check="strides", title="no tokens", shape=replace(EVEN, seq_len=0), dtype="fp32", layout=torch.clone),
)
COMPILED = (
    Case(check="compile", title="fullgraph", shape=EVEN, dtype="fp32", layout=torch.clone),
    Case(check="compile", title="fullgraph, dynamic", shape=EVEN, dtype="fp32", layout=torch.clone, dynamic=True),
)
