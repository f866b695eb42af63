"""What the program knows: values of small tensors that follow from the host's, and values made up where none do.

A storage of the GPU has values in a copy in main memory, as long as every operator that wrote to it read values only.
Views share the copy, as they share the storage.
"""

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligerprof.errors import UnsupportedError
from ligerprof.recipe.routing import UNIFORM, WORST, tokens_per_expert
from ligerprof.runs.recording.saved import storage_address
from ligerprof.simulated_gpu.plans import callable_for, functions

aten = torch.ops.aten

# tensors with more elements have no values: integers and bools (labels, positions, masks), and others
MOST_INTEGERS, MOST_FLOATS = 1 << 22, 1 << 12

_EMPTY = frozenset({aten.empty.memory_format, aten.empty_strided.default})
# the result of these is what it is on a GPU whatever the values: gradients are finite, the scale stays
_KEEPS = frozenset({aten._amp_foreach_non_finite_check_and_unscale_.default, aten._amp_update_scale_.default})
_FILLS = frozenset(
    [
        *(aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.copy_.default),
        *(aten.random_.default, aten.random_.to, getattr(aten.random_, "from")),
    ]
)
# what a program makes masks of, such as zeros_like(scores).int().scatter(...)
_ONE_NUMBER = frozenset({aten.zero_.default, aten.fill_.Scalar})
_BRANCHES = frozenset({"item of bool", "equal"})
# by torch.compile
_GENERATED = f"{os.sep}torchinductor_"
_DECORATORS = tuple(f"{os.sep}{name}.py" for name in ("contextlib", "functools", "typing_extensions"))
# of torch and of this package
_SKIPPED_FILES = (*(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, Path(__file__).parent)), "<frozen ")


class MadeUp(NamedTuple):
    """A kind of value that the machine made up, and the line of the program that asked for it.

    Attributes:
        what: such as `item of float32` or `nonzero`.
        is_shape: whether the size of a tensor depends on it.
        is_branch: whether the program asked whether it is true.
    """

    what: str
    place: str
    is_shape: bool
    is_branch: bool


class Known(NamedTuple):
    """The copy of a storage in main memory; `made_up` if its values follow from ones that were made up."""

    storage: torch.UntypedStorage
    made_up: bool


class Values:
    """The values of small tensors on the simulated GPU, by the address of their storage.

    Args:
        size_of: the bytes of the storage at an address.

    Attributes:
        on_change: called with the address of a storage whose known values change.
        inputs: bytes of large floats by the address of their storage, see rules.py.
        filled: the number that fills all of a large storage of floats, by its address.
    """

    def __init__(self, size_of: Callable[[int], int], routing: str = UNIFORM) -> None:
        self._size_of, self.routing = size_of, routing
        # numbers of the modules that route tokens, in the order of their first calls
        self._routers: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self.on_change: Callable[[int], None] | None = None
        self._known: dict[int, Known] = {}
        self.inputs: dict[int, Tensor] = {}
        self.filled: dict[int, Any] = {}
        self.made_up: Counter[MadeUp] = Counter()

    def note(self, what: str, *, is_shape: bool = False) -> None:
        """Count a value that was made up."""
        is_branch = what in _BRANCHES
        self.made_up[MadeUp(what, place(), is_shape, is_branch)] += 1

    def experts_of(self, tokens: int, experts: int, chosen: int) -> Tensor:
        """The experts that tokens choose, [tokens, chosen], where the program asks for the best of their scores.

        Raises:
            UnsupportedError: the routing is for another number of layers.
        """
        rows = [] if self.routing in (UNIFORM, WORST) else self.routing.split(";")
        if self.routing == UNIFORM or (rows and rows[0].count(",") + 1 != experts):
            # in turn; a given routing says nothing about another choice, such as the best tokens
            return functions.arange(tokens * chosen).view(tokens, chosen) % experts
        layer = self._number_of_router() if len(rows) > 1 else 0
        if layer >= max(len(rows), 1):
            raise UnsupportedError(
                f"{place()}: --routing has {len(rows)} lines, for fewer layers with experts than the model has."
                " Give one line for all, or one for each."
            )
        counts = tokens_per_expert(self.routing, layer, tokens=tokens, experts=experts, chosen=chosen)
        # no expert has more pairs than there are tokens, so that it is at most once in a row
        return functions.arange(experts).repeat_interleave(functions.tensor(counts)).view(chosen, tokens).t()

    def _number_of_router(self) -> int:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module):
                return self._routers.setdefault(module, len(self._routers))
            frame = frame.f_back
        return 0

    def forget(self, address: int) -> None:
        self._known.pop(address, None)
        self.inputs.pop(address, None)
        self.filled.pop(address, None)

    def known(self, tensor: Tensor) -> Known | None:
        """The copy of a tensor's storage."""
        return self._known.get(storage_address(tensor)) if self._known else None

    def is_made_up(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor follow from ones that were made up."""
        known = self.known(tensor)
        return known is not None and known.made_up

    def known_at(self, address: int) -> Known | None:
        return self._known.get(address)

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """A tensor in main memory with the values of one on the GPU, None if they are not known."""
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        known = self.known(tensor)
        if known is not None:
            return _shown(tensor, known.storage)
        number = self.filled.get(storage_address(tensor)) if self.filled else None
        return None if number is None else functions.full((), number, dtype=tensor.dtype).expand(tensor.shape)

    def set(self, tensor: Tensor, value: Tensor, *, made_up: bool = False, at_any_size: bool = False) -> None:
        """Give a whole storage the values of a tensor of the same shape in main memory, if it is small enough."""
        address = storage_address(tensor)
        size_bytes = self._size_of(address)
        if not (at_any_size or is_small(tensor)) or not size_bytes:
            return
        if self.on_change is not None:
            self.on_change(address)
        copy = torch.UntypedStorage(size_bytes, device="cpu")  # type: ignore[no-untyped-call]
        _shown(tensor, copy).copy_(value)
        self._known[address] = Known(copy, made_up)

    def covers(self, tensor: Tensor) -> bool:
        """Whether a tensor shows all of its storage."""
        return tensor.numel() * tensor.element_size() >= self._size_of(storage_address(tensor))

    def after(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, inputs: list[Tensor]
    ) -> None:
        """Follow the values through an operator that has just run; `inputs`: all tensors among the arguments."""
        mutable = func._schema.is_mutable
        if func in _KEEPS or func in _EMPTY:
            return
        written = _written(func, args, kwargs) if mutable else ()
        self._tell(written)
        if not self._all_known(func, inputs, written):
            for tensor in written if self._known else ():
                self._known.pop(storage_address(tensor), None)
            self._assume(func, result)
            return
        made_up = any(map(self.is_made_up, inputs))
        for tensor in written:
            if self.known(tensor) is None and tensor.is_cuda:
                self.set(tensor, functions.zeros(()), made_up=made_up)
                if self.known(tensor) is None:
                    if func in _ONE_NUMBER and self.covers(tensor):
                        self.filled[storage_address(tensor)] = args[1] if len(args) > 1 else 0
                    return
        try:
            self._run(func, args, kwargs, result, made_up=made_up)
        except (NotImplementedError, RuntimeError):
            # the CPU has no kernel for these types, or for a random generator of the GPU
            for tensor in written:
                self._known.pop(storage_address(tensor), None)

    def _tell(self, written: Iterable[Tensor]) -> None:
        for tensor in written if self.inputs or self.filled else ():
            self.inputs.pop(storage_address(tensor), None)
            self.filled.pop(storage_address(tensor), None)
        if self.on_change is not None and self._known:
            for tensor in written:
                if self.known(tensor) is not None:
                    self.on_change(storage_address(tensor))

    def _all_known(self, func: Any, inputs: Iterable[Tensor], written: Sequence[Tensor]) -> bool:
        """Whether the values of all arguments are known; those of what is overwritten as a whole need not be."""
        whole = func in _FILLS or func._schema.overload_name.endswith("out")
        for tensor in inputs:
            if not tensor.is_cuda:
                if tensor.numel() > MOST_INTEGERS:
                    return False
            elif (
                tensor.numel()
                and self.known(tensor) is None
                and not (self.filled and storage_address(tensor) in self.filled)
                and not (whole and any(tensor is other for other in written) and self.covers(tensor))
            ):
                return False
        return True

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, *, made_up: bool) -> None:
        """Run the operator on the copies."""
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random and any(tensor.dtype.is_floating_point for tensor in tensors_in(result)):
            return
        real_args = [self.real(value) for value in args]
        real_kwargs = {name: self.real(value) for name, value in kwargs.items()}
        with torch.no_grad(), torch.random.fork_rng(devices=[], enabled=random):
            values = callable_for(func, args)(*real_args, **real_kwargs)
        for tensor, value in zip(tensors_in(result), tensors_in(values), strict=False):
            if tensor.is_cuda and tensor.shape == value.shape and self.known(tensor) is None:
                self.set(tensor, value, made_up=made_up)
            elif not tensor.is_cuda and tensor is not value and tensor.shape == value.shape:
                tensor.copy_(value)

    def real(self, value: Any) -> Any:
        """An argument of an operator with the known values in main memory."""
        if isinstance(value, Tensor):
            return self.copy_of(value) if value.is_cuda else value
        if type(value) in (list, tuple):
            return type(value)([self.real(item) for item in value])
        if type(value) is torch.device:
            return torch.device("cpu")
        return None if isinstance(value, torch.Generator) else value

    def _assume(self, func: Any, result: Any) -> None:
        """A single number that a model computes is 1, so that losses and norms are finite."""
        if not isinstance(result, Tensor) or not result.is_cuda or result.numel() != 1:
            return
        is_number = result.dtype.is_floating_point and self.known(result) is None
        if is_number or (result.dtype == torch.bool and func._schema.name == "aten::all"):
            self.set(result, functions.ones(()), made_up=True)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes to."""
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            found.extend(tensors_in(value))
    return found


def is_small(tensor: Tensor) -> bool:
    """Whether the values of a tensor are kept."""
    floats = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.numel() <= (MOST_FLOATS if floats else MOST_INTEGERS)


def tensors_in(value: Any) -> Iterable[Tensor]:
    """All tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _shown(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    empty = functions.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def is_skipped(file: str) -> bool:
    """Whether a file of code is torch's, this package's, a decorator's, or one that torch.compile wrote."""
    return file.startswith(_SKIPPED_FILES) or _GENERATED in file or file.endswith(_DECORATORS)


def place() -> str:
    """File and line of the innermost frame that is neither torch's, nor generated by torch.compile, nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_skipped(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def at_place() -> str:
    """The place as a message begins with it; nothing in backward, whose operators have no frame."""
    found = place()
    return "" if found == "?" else f"{found}: "
