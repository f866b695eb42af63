"""A tape: what a model's forward and backward pass allocates, saves and frees, traced from the model's own code.

It is a list of units: what precedes the layers that checkpointing runs again, each such layer with what follows it, and
what follows the last. Units that are alike are stored once. Sizes are polynomials of the batch's rows B and tokens T.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ligerprof.gpus import GpuSpec
from ligerprof.roles import Role
from ligerprof.torch_memory import attention as fused
from ligerprof.torch_memory import layer_norm, reductions, softmax
from ligerprof.torch_memory import sorting as embedding
from ligerprof.torch_memory import sorting as scans
from ligerprof.torch_memory.attention import AttentionKernel, AttentionProblem
from ligerprof.torch_memory.dtypes import Scratch, together

FORMAT = 2

# kernels pad and copy what is not a multiple of these, so that tokens with another largest one have other operators
_MULTIPLES = (128, 64, 32, 16, 8, 1)

# powers of B and T, in the order of a polynomial's coefficients
POWERS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))

# A block of a unit is its number among the unit's allocations, those of backward after those of forward. In another
# unit: (its distance, number), and (None, number) and (0, number) are blocks of the last and of the first unit.
Ref = int | tuple[int | None, int]

# Both passes: ("take", size, role), ("touch", scratch, role), ("drop", ref), ("multiply",) at the first product of
# matrices, ("arrive", parameter, ref). Forward: ("save", node, ref or None), without a node if that never runs
# backward; ("enter", refs) and ("leave",) around what checkpointing runs again. Backward: ("start", node);
# ("unpacked", node) where the node frees what a hook has unpacked for it, ("release", node) where autograd frees what
# it has saved; ("hold", ref) where a block of forward has one holder more.
Event = tuple[Any, ...]

# what operators allocate while they run, which is not a polynomial
SCRATCHES: Mapping[str, Callable[..., Scratch]] = {
    "reduction": reductions.reduction_scratch,
    "layer norm": layer_norm.backward_scratch,
    "softmax": softmax.backward_scratch,
    "safe softmax": softmax.safe_scratch,
    "cumsum": scans.cumsum_scratch,
    "attention forward": fused.forward_scratch,
    "attention backward": fused.backward_scratch,
    "flash splits": lambda *arguments: together(*fused.flash_split_sizes(*arguments)),
    "embedding": lambda *arguments, **named: sum(embedding.embedding_scratch(*arguments, **named), ()),
}
# types of their arguments
_RECORDS: Mapping[str, type] = {"Axes": reductions.Axes, "AttentionProblem": AttentionProblem}


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of the model.

    Attributes:
        forward, backward: its events.
        graph: blocks that the graph holds until it ends, although no node has saved them.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    graph: tuple[Ref, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TapeParameter:
    """A parameter: its name, shape, bytes per element, and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    width: int
    trained: bool


@dataclass(frozen=True, kw_only=True)
class Tape:
    """A traced model.

    Attributes:
        polynomials: a denominator and the coefficients of `POWERS` of each number, such as bytes of a block.
        scratches: a name in `SCRATCHES`, and its arguments and named arguments as `encoded` returns them.
        units: the units that differ.
        order: the unit at each position: before the layers, the layers, after them.
        layers: path of each layer's module in the order of their calls; `{}` in parameters of a unit is replaced by it.
        numbers: number of each layer among the model's modules, by which checkpointing chooses layers.
        parameters: all parameters.
        built: bytes of each block that building the model allocates, and its number less than 0 where it frees one.
        buffers: bytes of each block that the model holds besides its parameters, such as buffers.
        attention: names of the attention kernels that ran.
        workspaces: bytes that libraries keep for good after a first pass, by "forward" and "backward"
            and with "recomputed" for those that a layer's recomputation adds to backward.
        batch, seq: the lowest and highest numbers that the polynomials were checked between.
        multiple: the `largest_multiple` of the tokens that it covers.
        bounded_bytes: the largest size that is an upper bound only; 0 without any.
        offloaded: the polynomial of the main memory that saved tensors take.
    """

    polynomials: tuple[tuple[int, ...], ...]
    scratches: tuple[Any, ...]
    units: tuple[Unit, ...]
    order: tuple[int, ...]
    layers: tuple[str, ...]
    numbers: tuple[int, ...]
    parameters: tuple[TapeParameter, ...]
    built: tuple[int, ...]
    buffers: tuple[int, ...]
    attention: tuple[str, ...]
    workspaces: Mapping[str, int]
    batch: tuple[int, int]
    seq: tuple[int, int]
    multiple: int
    bounded_bytes: int = 0
    offloaded: int | None = None

    @property
    def flat(self) -> bool:
        """Whether it is one unit, in the order in which the passes ran: with checkpointing as it was traced."""
        return len(self.order) <= 2

    def covers(self, batch: int, seq: int) -> bool:
        """Whether the polynomials were checked around this size."""
        inside = self.batch[0] <= batch <= self.batch[1] and self.seq[0] <= seq <= self.seq[1]
        return inside and largest_multiple(seq) == self.multiple

    def values(self, batch: int, seq: int) -> list[int]:
        """The value of each polynomial."""
        powers = [batch**row * seq**token for row, token in POWERS]
        return [
            sum(coefficient * value for coefficient, value in zip(rest, powers, strict=True)) // denominator
            for denominator, *rest in self.polynomials
        ]

    def touched(self, numbers: Sequence[int], gpu: GpuSpec) -> list[Scratch]:
        """The blocks of each scratch."""
        found = []
        for name, arguments, named in self.scratches:
            values = _decoded(arguments, numbers, gpu)
            options = {key: _decoded(value, numbers, gpu) for key, value in named}
            found.append(SCRATCHES[name](*values, **options))
        return found

    def workspaces_of(self, *, checkpointing: bool) -> tuple[int, int]:
        """Bytes of libraries' workspaces in the threads of forward and backward."""
        again = self.workspaces["recomputed"] if checkpointing else 0
        return self.workspaces["forward"], self.workspaces["backward"] + again

    def layer_of(self, parameter: str) -> int | None:
        """Index of the layer that a parameter belongs to, in the order of calls; None outside the units of layers."""
        return None if self.flat else self.owner_of(parameter)

    def owner_of(self, parameter: str) -> int | None:
        """Index of the layer whose module has a parameter, even if the tape has no units of layers."""
        return next((index for index, path in enumerate(self.layers) if parameter.startswith(f"{path}.")), None)

    def unit(self, position: int) -> Unit:
        """The unit at a position."""
        return self.units[self.order[position]]

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The key of layers that are alike; units that cannot be repeated each have a key of their own."""
        return tuple(kind if _is_local(self.units[kind]) else -1 - index for index, kind in enumerate(self.order[1:-1]))

    def stream(self, position: int) -> frozenset[int]:
        """Blocks of a unit that the next layer alone receives, which is what checkpointing keeps of it."""
        following = self._received(position + 1)
        if position == 0:
            return frozenset(number for where, number in following - self._received(2) if where == 0)
        return frozenset(number for where, number in following if where == -1)

    def _received(self, position: int) -> set[tuple[int | None, int]]:
        """Blocks of other units that a layer receives."""
        if position >= len(self.order) - 1:
            return set()
        refs = next((event[1] for event in self.unit(position).forward if event[0] == "enter"), ())
        return {ref for ref in refs if isinstance(ref, tuple)}

    def position_of(self, ref: Ref, position: int) -> tuple[int, int]:
        """The position of the unit that a block belongs to, and its number there."""
        if isinstance(ref, int):
            return position, ref
        distance, number = ref
        if distance is None:
            return len(self.order) - 1, number
        return (0 if distance == 0 else position + distance), number

    def dumps(self) -> bytes:
        """The tape as JSON."""
        content = {
            "format": FORMAT,
            "polynomials": self.polynomials,
            "units": [{"forward": unit.forward, "backward": unit.backward, "graph": unit.graph} for unit in self.units],
            **{
                name: getattr(self, name)
                for name in (
                    "scratches",
                    "order",
                    "built",
                    "buffers",
                    "attention",
                    "layers",
                    "numbers",
                    "workspaces",
                    "batch",
                    "seq",
                )
            },
            "parameters": [(item.name, item.shape, item.width, item.trained) for item in self.parameters],
            "multiple": self.multiple,
            "bounded_bytes": self.bounded_bytes,
            "offloaded": self.offloaded,
        }
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def loads(cls, data: bytes) -> "Tape":
        """Read what `dumps` wrote; raises ValueError, KeyError, TypeError or IndexError for anything else."""
        content = json.loads(data)
        if content.pop("format") != FORMAT:
            raise ValueError("another format")
        units = tuple(
            Unit(
                forward=tuple(map(_event, unit["forward"])),
                backward=tuple(map(_event, unit["backward"])),
                graph=tuple(map(_ref, unit["graph"])),
            )
            for unit in content.pop("units")
        )
        parameters = tuple(
            TapeParameter(name=name, shape=tuple(shape), width=width, trained=trained)
            for name, shape, width, trained in content.pop("parameters")
        )
        workspaces = content.pop("workspaces")
        plain = {name: _tuples(value) for name, value in content.items()}
        return cls(units=units, parameters=parameters, workspaces=workspaces, **plain)


def largest_multiple(seq: int) -> int:
    """The largest of 128, 64, 32, 16, 8 and 1 that divides a number of tokens."""
    return next(multiple for multiple in _MULTIPLES if seq % multiple == 0)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _ref(value: Any) -> Ref:
    return value if isinstance(value, int) else (value[0], value[1])


def _event(value: Sequence[Any]) -> Event:
    kind, *rest = value
    if kind in ("take", "touch"):
        return (kind, rest[0], Role(rest[1]))
    return (kind, *(_tuples(item) for item in rest))


def _is_local(unit: Unit) -> bool:
    """Whether a layer frees only its own blocks and its neighbours', and reads only those and the first unit's."""
    if unit.graph:
        return False
    for kind, *rest in (*unit.forward, *unit.backward):
        if kind == "drop" and not (isinstance(rest[0], int) or rest[0][0] in (-1, 1)):
            return False
        read = rest[0] if kind == "enter" else rest[1:] if kind == "save" else ()
        if any(isinstance(ref, tuple) and ref[0] not in (-1, 0) for ref in read):
            return False
    return True


def encoded(value: Any, numbers: list[int]) -> Any:
    """An argument of a scratch as JSON, with its integers appended to `numbers` and replaced by their places there."""
    if isinstance(value, GpuSpec):
        return ("gpu",)
    if isinstance(value, AttentionKernel):
        return ("kernel", value.value)
    if isinstance(value, (list, tuple)):
        return ("list", *(encoded(item, numbers) for item in value))
    if type(value).__name__ in _RECORDS:
        fields = dataclasses.fields(value)
        return (type(value).__name__, *((item.name, encoded(getattr(value, item.name), numbers)) for item in fields))
    if isinstance(value, int) and not isinstance(value, bool):
        numbers.append(value)
        return ("number", len(numbers) - 1)
    return ("is", value)


def _decoded(value: Any, numbers: Sequence[int], gpu: GpuSpec) -> Any:
    kind, *rest = value
    if kind == "gpu":
        return gpu
    if kind == "kernel":
        return AttentionKernel(rest[0])
    if kind == "list":
        return tuple(_decoded(item, numbers, gpu) for item in rest)
    if kind in _RECORDS:
        return _RECORDS[kind](**{name: _decoded(item, numbers, gpu) for name, item in rest})
    return numbers[rest[0]] if kind == "number" else rest[0]
