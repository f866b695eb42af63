"""Record a small model and its decoder layers as tapes: the tensor operators of transformers' own code, in order."""

import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ligerprof.models import ModelSpec
from ligerprof.models.layer_tape import Operand, Step

# dimensions of a tensor whose heads are apart
_BY_HEADS = 4
# sizes that do not depend on a config or a batch, such as three positions for each token
_LARGEST_FIXED = 3
# the steps of operators
_JOINS = ("cat", "stack", "concat")
_STEPS = {
    **dict.fromkeys(_JOINS, "join"),
    **dict.fromkeys(("clamp", "gelu", "hardswish", "hardtanh", "leaky_relu", "mish", "silu", "softplus"), "keep input"),
    **dict.fromkeys(("exp", "relu", "rsqrt", "sigmoid", "tanh"), "keep output"),
    "add": "add",
    "mul": "multiply",
    "div": "multiply",
    "_log_softmax": "log softmax",
    "nll_loss_forward": "nll",
    "neg": "negate",
    "clone": "copy",
    "pow": "power",
    "mean": "mean",
    "gather": "gather",
    "scatter": "gather into",
    "masked_fill": "mask out",
    "bmm": "batch product",
    "cumsum": "cumulate",
    "linalg_solve_triangular": "solve",
}
# the same in place
_IN_PLACE = {
    "add_": "add in place",
    "div_": "divide in place",
    "index_add_": "add rows in place",
    "mul_": "scale in place",
    "scatter_": "place",
}
# operators whose sizes do not follow from those of their operands
_SIZED = {"sum": "sum", "topk": "top", "max": "top", "repeat": "repeat", "constant_pad_nd": "pad"}
# of operators that are not known, and have no step if their results lead to no output
_UNKNOWN = "unknown "
# steps that say how many of the next ones are their own
_WRAPPERS = ("gated", "rotate", "mixture")
_CUTS = ("slice", "select")
_SPLITS = ("split", "split_with_sizes", "unbind")
# steps that may make no new tensor, in mixers also where they lead to no output
_KEPT = ("autocast", "cast", "cut", "expand", "split", "turn")
# what the gradient of a view of all elements may run besides views
_GRADIENT_COPIES = ("aten::clone", "aten::select_backward", "aten::slice_backward")
# sizes that tensors of mixers may be flattened over
_FLAT = (
    "rows",
    "tokens",
    "batch",
    "chunks",
    "chunk",
    "padded",
    "key heads",
    "value heads",
    "repeats",
    "value",
    "head states",
    "heads",
    "kv heads",
    "heads per kv",
)


class UnknownOperatorError(Exception):
    """A layer runs an operator that tapes of layers do not have."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators of a layer or a model, without those of modules that have steps of their own.

    Args:
        sizes: names of the sizes that do not follow from a step's operands.
        casts: what each call of `to` in a mixer casts to; None to learn it.
        copies: the operators, by their numbers, whose gradients are copied.

    Attributes:
        mixes: whether a module runs that mixes tokens by something else than attention.
        in_turn: whether it records experts that run one after another.
        gated: tensors, by their ids, that gated products have read.
        targets: what calls of `to` in a mixer have cast to, where autocast and weights have 16-bit dtypes of their own.
        copying: the operators whose gradients were copied.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: nn.Module,
        sizes: Mapping[int, str],
        *,
        casts: Sequence[str] | None = None,
        copies: Set[int] = frozenset(),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._spec, self._sizes, self._copies = spec, sizes, copies
        self._casts = None if casts is None else iter(casts)
        self.mixes, self.targets, self.copying = False, list[str](), set[int]()
        self.in_turn, self.gated = False, set[int]()
        # the number of the last operator, and of those that have made nodes of a graph
        self._at = 0
        self._nodes: dict[int, int] = {}
        self.steps: list[Step] = []
        self._tables: set[int] = set()
        self._empty: set[Operand] = set()
        self._turned: set[Operand] = set()
        self.active, self.muted, self.autocasts = False, 0, True
        self._numbers: dict[int, Operand] = {}
        self._shapes: dict[int, torch.Size] = {}
        self._blocks: dict[int, list[int]] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._sources: dict[int, Operand] = {}
        self._names = {id(parameter): f"p:{name}" for name, parameter in layer.named_parameters()}
        self._buffers = {id(buffer) for buffer in layer.buffers()}

    def add(self, tensor: Tensor, source: Operand | None = None) -> int:
        """Give a tensor a number."""
        number = len(self._dtypes)
        self._numbers[id(tensor)], self._dtypes[number], self._shapes[number] = number, tensor.dtype, tensor.shape
        if source is not None:
            self._sources[number] = source
        self._hold(tensor, number)
        return number

    def _hold(self, tensor: Tensor, number: int) -> None:
        """Note where the last Python variable of the tensor's memory ends; views hold it as well."""
        block = tensor.untyped_storage()._cdata
        self._blocks.setdefault(block, [number, 0])[1] += 1
        weakref.finalize(tensor, self._end, id(tensor), block)

    def _end(self, tensor: int, block: int) -> None:
        self._numbers.pop(tensor, None)
        held = self._blocks[block]
        held[1] -= 1
        if not held[1]:
            del self._blocks[block]
            if self.active:
                self.steps.append(["drop", held[0]])

    def operand(self, tensor: Tensor) -> Operand:
        """The number of a tensor, the name of a parameter, or what is known of another tensor from outside."""
        found: Operand | None = self._numbers.get(id(tensor), self._names.get(id(tensor)))
        if found is not None:
            return found
        return "buffer" if self.mixes and id(tensor) in self._buffers else _width(tensor)

    def add_table(self, tensor: Tensor) -> int:
        """Give a number to a tensor without a gradient."""
        number = self.add(tensor)
        self._tables.add(number)
        return number

    def macro(self, kind: str, inputs: Sequence[Operand], outputs: Sequence[Tensor], *details: Any) -> None:
        """A step in place of all operators of a module or function."""
        made = [self.add(tensor, inputs[0]) for tensor in outputs]
        self._tables.update(
            number
            for number, tensor in zip(made, outputs, strict=True)
            if not (tensor.is_floating_point() or tensor.is_complex())
        )
        self.steps.append([kind, made if len(made) > 1 else made[0], list(inputs), *details])

    @property
    def reads_products(self) -> bool:
        """Whether the products of a mixer are recorded."""
        return self.mixes and self.active and not self.muted

    def read(self, item: Any) -> Any:
        """What autocast passes to a product of two values: another tensor of the same layout."""
        if not isinstance(item, Tensor) or torch.is_grad_enabled():
            return item
        with quiet(self):
            result = item.new_empty_strided(item.shape, item.stride())
        self.macro("autocast", [self.operand(item)], [result])
        return result

    def to_half(self, value: Tensor) -> Tensor:
        """Record a cast to the dtype of autocast's products."""
        if self.muted or not self.active:
            return value
        with quiet(self):
            result = value.clone()
        self.macro("cast", [self.operand(value)], [result], "half")
        return result

    def cast(self, value: Tensor, result: Tensor, like: Tensor | None) -> Tensor:
        """Record `value.to(...)` where it does nothing here but may elsewhere.

        A mixer casts to the dtype of `like`, or to one that was learned, and so do experts that run in turn; sums are
        cast to the dtype of what experts receive, as autocast computes sums in fp32.
        """
        if self.mixes and self._casts is None:
            self.targets.append(_TARGETS[result.dtype])
        elif self.mixes and self._casts is not None:
            to: Operand = next(self._casts)
            to = to if like is None or like.dtype != result.dtype else self.operand(like)
            if result is not value:
                self.steps[-1] = [*self.steps[-1][:-1], to]
                return result
            with quiet(self):
                result = value.clone()
            self.macro("cast", [self.operand(value)], [result], to)
            return result
        experts = next((step for step in self.steps if step[:2] == ["mixture", -1]), None)
        is_of_experts = experts is not None and ["sum", self.operand(value)] == self.steps[-1][:2]
        if result is not value or not (is_of_experts or self.in_turn):
            return result
        to = experts[2][0] if experts is not None else "narrow" if like is None else self.operand(like)
        with quiet(self):
            result = value.clone()
        self.macro("cast", [self.operand(value)], [result], to)
        return result

    def product(self, operands: Sequence[Operand], result: Tensor, *, is_function: bool) -> None:
        """`F.linear` or `@`, with a weight or a part of one."""
        if any(step[0] == "part" and step[1] == operands[1] for step in self.steps):
            self.macro("part product", operands, [result], self._dims(result.shape[:1]), is_function)
        else:
            self.macro("product", operands, [result], self.autocasts)

    def one_hot(self, result: Tensor) -> None:
        """A mask of chosen classes, which a CPU makes by other operators than a GPU."""
        self.steps.append(["new", self.add_table(result), [], self._dims(result.shape), _width(result)])

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if torch._C._current_graph_task_id() != -1:
            node = torch._C._current_autograd_node()
            if name in _GRADIENT_COPIES and ("View" in node.name() or "Select" in node.name()):
                self.copying.add(self._nodes.get(node._sequence_nr(), 0))
            return result
        if self.active and name != "aten::detach" and isinstance(result, (Tensor, list, tuple)):
            self.count()
            self._nodes[torch.autograd._get_sequence_nr() - 1] = self._at
            # what a mixer casts to is learned under autocast, whose own casts are no steps
            if not self.muted and not (self.mixes and self._casts is None):
                self._operator(name.removeprefix("aten::"), args, kwargs or {}, result)
        return result

    def count(self) -> None:
        """Count an operator, or a module that stands for all of its own."""
        self._at += not self.muted

    def turn(self, result: Tensor) -> None:
        """Say that the gradient of what the last operator or module has made is copied, if it is."""
        if self._at in self._copies:
            self.macro("turn", [self.operand(result)], [result])

    def _operator(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        given = args[0] if name in _JOINS else args
        inputs = [self.operand(item) for item in given if isinstance(item, Tensor)]
        is_view = self._is_view(next(iter(given), None), results[0])
        if name == "nonzero":
            # how many experts have tokens, or the tokens of one
            sizes = ["hits" if given[0].ndim == 1 else "routed", given[0].ndim]
            among = self._dims(given[0].shape)
            self.steps.append(["find", self.add_table(result), [], sizes, among, given[0].is_contiguous()])
        elif name.endswith("_like") or not any(map(self._has_gradient, inputs)):
            for made in results:
                self._table(name, made, next(iter(inputs), "narrow"), is_view=is_view)
        elif name in _IN_PLACE:
            more = (given[0]._is_view(),) if name == "mul_" else ()
            self._tables.discard(inputs[0])  # type: ignore[arg-type]
            self.steps.append([_IN_PLACE[name], inputs[0], inputs, *more])
        elif name != "copy_" and is_view and given[0].nbytes == results[0].nbytes:
            if self._at in self._copies:
                self.macro("turn", inputs, results)
                return
            self._again(results[0], inputs[0])
            if name == "view" and results[0].ndim == given[0].ndim + 1 == _BY_HEADS and self._spec.latent is None:
                self.steps.append(["heads", inputs[0], inputs, ""])
            elif name == "transpose" and given[0].ndim == _BY_HEADS:
                self._turned.add(inputs[0])
        elif name == "_to_copy":
            wide = kwargs.get("dtype") is torch.float32
            self.macro("cast", inputs, results, "wide" if wide else self._narrow_source(inputs[0]))
        elif name == "mul" and self._is_scaling(given, inputs):
            self._scale(given, inputs, results)
        elif name == "div" and len(inputs) > 1:
            self.macro("divide", inputs, results)
        elif self.mixes and self._of_mixer(name, given, inputs, results):
            pass
        elif name == "sub":
            self.macro("subtract", inputs, results)
        elif name in _STEPS:
            self.macro(_STEPS[name], inputs, results)
        elif name in _SIZED:
            self.macro(_SIZED[name], inputs, results, self._dims(results[0].shape))
        elif name == "index":
            indices = [item for item in given[1] if item is not None]
            chosen = [self._dims(results[0].shape[:1])] if self.in_turn else []
            operands = [inputs[0], self.operand(indices[0])]
            self.macro("index", operands, results, self._dims(given[0].shape[: len(indices)]), *chosen)
        elif name == "mm":
            self.product(inputs, results[0], is_function=False)
        else:
            self._parts_of_memory(name, given, inputs, results)

    def _of_mixer(self, name: str, given: Sequence[Any], inputs: Sequence[Operand], results: Sequence[Tensor]) -> bool:
        """Record an operator whose sizes follow from the operands in what other modules do, but not in mixers."""
        sizes = results[0].shape
        if name == "convolution":
            assert isinstance(inputs[1], str)
            self.macro("convolve", inputs[:1], results, inputs[1].removeprefix("p:").removesuffix(".weight"))
        elif name == "bmm":
            self.macro("product of values", inputs, results, self._dims(sizes))
        elif name == "sum":
            self.macro("sum", inputs, results, self._dims(sizes), "view")
        elif name in ("mean", "expand", "slice", "select"):
            kind = {"slice": "cut", "select": "cut"}.get(name, name)
            self.macro(kind, inputs, results, self._dims(sizes))
        elif name == "sub" and results[0].numel() != given[0].numel():
            self.macro("subtract", inputs, results, self._dims(sizes))
        elif name in ("split", "split_with_sizes") and len({item.numel() for item in results}) > 1:
            self.macro("split", inputs, results, [self._dims(item.shape[-1:]) for item in results])
        else:
            return False
        return True

    def _parts_of_memory(
        self, name: str, given: Sequence[Any], inputs: Sequence[Operand], results: Sequence[Tensor]
    ) -> None:
        """Operators that show or fill a part of a tensor."""
        if name in _SPLITS:
            if inputs[0] in self._turned:
                self._heads_of(inputs[0], "split")
            self.macro("split", inputs, results, self._parts(results))
        elif name == "new_empty":
            self._empty.add(self._made("empty", inputs, results[0], self._elements_per_head(results[0]), inputs[0]))
        elif name in _CUTS and inputs[0] in self._empty:
            # what is copied into it is written into all of it
            self.add(results[0], inputs[0])
        elif name == "select" and isinstance(inputs[0], str):
            self.macro("part", inputs, results)
        elif name in _CUTS:
            self.macro("cut", inputs, results, self._share(given[0], results[0]))
        elif name == "copy_":
            base = self._sources.get(inputs[0], inputs[0]) if isinstance(inputs[0], int) else inputs[0]
            # the view that it is written into has no other use
            self.steps = [step for step in self.steps if step[:2] != ["cut", inputs[0]]]
            self._tables.discard(base)  # type: ignore[arg-type]
            self.steps.append(["write", base, [base, inputs[1]]])
        elif name == "expand" and results[0].numel() == self._spec.heads * given[0].numel():
            self.macro("expand", inputs, results)
        else:
            self.macro(f"{_UNKNOWN}{name}", inputs, results)

    def _heads_of(self, number: Operand, kind: str) -> None:
        """Say what becomes of heads, if this is a view of some."""
        for step in self.steps:
            if step[0] == "heads" and step[1] == number:
                step[3] = kind  # type: ignore[index]

    def finish(self) -> list[Step]:
        """All steps; views as heads say whether they are rotated, and go unless attention reads them."""
        source = {step[1]: step[2][0] for step in self.steps if step[0] == "norm"}
        for kind, readers in (("plain", "attend"), ("rotated", "rotate")):
            for number in (each for step in self.steps if step[0] == readers for each in step[2]):
                self._heads_of(number, kind)
                self._heads_of(source.get(number, number), kind)
        steps = [step for step in self.steps if step[0] != "heads" or step[3]]
        for step in steps:
            if step[0] == "mixture":
                step[-2] = step[-2] in self.gated  # type: ignore[index]
        return list(self._without_unused_gradients(steps))

    def _without_unused_gradients(self, steps: Sequence[Step]) -> Iterator[Step]:
        """The same with tensors without a gradient in place of those that lead to no output, such as biased scores."""
        live: set[Operand] = set(several(steps[-1][1]))
        for kind, results, *rest in reversed(steps[:-1]):
            made = set(several(results)) if kind not in ("drop", *_WRAPPERS) else set()
            if made & live and kind.startswith(_UNKNOWN):
                raise UnknownOperatorError(kind.removeprefix(_UNKNOWN))
            if made & live:
                live.update(each for each in rest[0] if self._has_gradient(each))
        kept = ("drop", "output", "new", "find", *_WRAPPERS, *(_KEPT if self._casts is not None else ()))
        for step in steps:
            kind, results, *rest = step
            if kind in kept or live.intersection(several(results)):
                yield step
                continue
            for number in several(results):
                source = next(iter(rest[0]), None)
                same = isinstance(source, int) and self._dtypes[source] == self._dtypes[number]
                yield [
                    "new",
                    number,
                    [],
                    self._dims(self._shapes[number]),
                    source if same else _name(self._dtypes[number]),
                ]

    def _has_gradient(self, operand: Operand) -> bool:
        return operand not in self._tables if isinstance(operand, int) else operand.startswith("p:")

    def _is_scaling(self, given: Sequence[Any], inputs: Sequence[Operand]) -> bool:
        return len(inputs) > 1 and all(map(self._has_gradient, inputs)) and given[0].shape != given[1].shape

    def _scale(self, given: Sequence[Tensor], inputs: Sequence[Operand], results: Sequence[Tensor]) -> None:
        """A product with a number for each row or column of the larger factor."""
        large = 0 if given[0].numel() > given[1].numel() else 1
        shape = "rows" if given[1 - large].shape[-1] == 1 else "columns"
        self.macro("multiply", [inputs[large], inputs[1 - large]], results, shape)

    def _table(self, name: str, result: Tensor, source: Operand, *, is_view: bool) -> None:
        """What does not depend on the layer's input has no gradient."""
        if is_view:
            if isinstance(source, int):
                self._again(result, source)
            return
        number = self.add_table(result)
        if name == "_to_copy" and isinstance(source, int) and _width(result) != "int":
            self.steps.append(["cast", number, [source], _width(result)])
        else:
            like = source if name.endswith("_like") and (self.mixes or self.in_turn) else _width(result)
            self.steps.append(["new", number, [], self._dims(result.shape), like])

    def _dims(self, shape: Sequence[int]) -> list[int | str]:
        named = (self._flat(size) if self._casts is not None else [self._named(size)] for size in shape)
        return [name for names in named for name in names]

    def _flat(self, size: int) -> list[int | str]:
        """The names of a size, which may be a product; none of 1."""
        if size in self._sizes or size <= _LARGEST_FIXED:
            return [self._named(size)] if size > 1 else []
        values = {name: value for value, name in self._sizes.items()}
        names = [name for name in _FLAT if name in values]
        for count in range(2, 5):
            for chosen in combinations(names, count):
                if size == prod(values[name] for name in chosen):
                    return list(chosen)
        raise UnknownOperatorError(f"a size of {size}")

    def _named(self, size: int) -> int | str:
        found = self._sizes.get(size, size)
        if isinstance(found, int) and found > _LARGEST_FIXED:
            raise UnknownOperatorError(f"a size of {size}")
        return found

    def _again(self, result: Tensor, source: Operand) -> None:
        """A view of all elements has the number of its source, or the name of a parameter."""
        self._numbers[id(result)] = source
        if isinstance(source, int):
            self._hold(result, source)
        else:
            weakref.finalize(result, self._numbers.pop, id(result), None)

    def _made(self, kind: str, operands: Sequence[Operand], result: Tensor, *details: Any) -> int:
        """The number of what a step without operands makes, on the device and in the dtype of others."""
        number = self.add(result, operands[0])
        self.steps.append([kind, number, [], *details])
        return number

    def _elements_per_head(self, result: Tensor) -> str:
        if self._spec.latent is None or result.shape[-1] != self._spec.latent.plain_dim + self._spec.latent.rotated_dim:
            raise UnknownOperatorError(f"a new tensor of shape {tuple(result.shape)}")
        return "query"

    def _parts(self, results: Sequence[Tensor]) -> int | list[str]:
        """The number of equal parts, or the names of their sizes."""
        latent, sizes = self._spec.latent, [item.shape[-1] for item in results]
        if len(set(sizes)) == 1:
            return len(results)
        if latent is None:
            raise UnknownOperatorError(f"parts of {sizes} elements")
        names = {
            latent.plain_dim: "plain",
            latent.rotated_dim: "rotated",
            latent.value_dim: "value",
            latent.key_rank: "latent key",
        }
        return [names[size] for size in sizes]

    def _share(self, source: Tensor, result: Tensor) -> str:
        """The part of the source that a view has."""
        spec, (whole, part) = self._spec, (source.shape[-1], result.shape[-1])
        heads = spec.heads + 2 * spec.kv_heads
        known = {
            (spec.head_dim, spec.rotary_dim): "rotated",
            (spec.head_dim, spec.head_dim - spec.rotary_dim): "rest",
            (heads * spec.head_dim, spec.heads * spec.head_dim): "query",
            (heads * spec.head_dim, spec.kv_heads * spec.head_dim): "key",
        }
        if (whole, part) in known:
            return known[whole, part]
        if 2 * part == whole:
            return "half"
        raise UnknownOperatorError(f"a view of {part} of {whole} elements")

    @staticmethod
    def _is_view(source: Any, result: Any) -> bool:
        return isinstance(source, Tensor) and source.untyped_storage()._cdata == result.untyped_storage()._cdata

    def _narrow_source(self, number: Operand) -> Operand:
        """The tensor whose dtype a cast from fp32 restores."""
        while isinstance(number, int) and self._dtypes[number] is not torch.bfloat16:
            number = self._sources.get(number, "narrow")
        return number if isinstance(number, int) else "narrow"


_SOFTMAXES = (functional.softmax, torch.softmax, Tensor.softmax)
# half: of what autocast's products return
_TARGETS = {torch.float16: "narrow", torch.bfloat16: "half", torch.float32: "wide"}
_PRODUCTS = (torch.einsum, torch.matmul, Tensor.matmul, Tensor.__matmul__)
_CASTS = (Tensor.to, Tensor.type)
_FUNCTIONS = (
    functional.dropout,
    functional.layer_norm,
    functional.linear,
    functional.one_hot,
    *_CASTS,
    *_SOFTMAXES,
)


class Functions(TorchFunctionMode):
    """Dropouts and softmaxes, which a CPU computes by other operators than a GPU, and products with raw weights."""

    def __init__(self, recorder: Recorder, dropouts: Mapping[float, tuple[str, float]]) -> None:
        super().__init__()
        self._recorder, self._dropouts = recorder, dropouts
        # the tensor whose dtype was read last
        self._like: Tensor | None = None

    def __torch_function__(
        self, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named, recorder, like = kwargs or {}, self._recorder, self._like
        self._like = args[0] if func == Tensor.dtype.__get__ else None  # type: ignore[attr-defined]
        if func in _PRODUCTS and recorder.reads_products:
            read = [recorder.read(item) for item in reversed(args)]
            result = func(*read[::-1], **named)
            # C++ frees first what it has made last
            while read:
                read.pop()
            return result
        if func not in _FUNCTIONS or not recorder.active or recorder.muted:
            return func(*args, **named)
        if func in _CASTS:
            return recorder.cast(args[0], func(*args, **named), like)
        value, rate = args[0], named.get("p", args[1] if len(args) > 1 else 0.5)
        with quiet(recorder):
            result = value.clone() if func is functional.dropout else func(*args, **named)
        operands = [recorder.operand(item) for item in (*args, *named.values()) if isinstance(item, Tensor)]
        if func is functional.dropout:
            recorder.macro("dropout", operands, [result], *self._dropouts.get(rate, (None, rate)))
        elif func is functional.linear:
            recorder.product(operands, result, is_function=True)
        elif func is functional.one_hot:
            recorder.one_hot(result)
        elif func is functional.layer_norm:
            recorder.macro("layer norm", operands, [result], recorder.autocasts)
        else:
            recorder.macro("soften", operands, [result], _asked(recorder, named.get("dtype"), like))
        return result


def _asked(recorder: Recorder, dtype: torch.dtype | None, like: Tensor | None) -> Operand:
    """The dtype that a softmax is asked for: that of a tensor, fp32 or none."""
    if dtype is not None and like is not None and like.dtype == dtype:
        return recorder.operand(like)
    return "wide" if dtype is torch.float32 else ""


@contextmanager
def quiet(recorder: Recorder) -> Iterator[None]:
    recorder.muted += 1
    yield
    recorder.muted -= 1


def _width(tensor: Tensor) -> str:
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    names = {torch.float32: "wide", torch.int64: "long", torch.int32: "int", torch.bool: "flag"}
    return "complex" if dtype.is_complex else names.get(dtype, "narrow")


def several(numbers: int | Sequence[int]) -> Sequence[int]:
    return [numbers] if isinstance(numbers, int) else numbers
