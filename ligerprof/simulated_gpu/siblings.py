"""Layers that are alike run once a pass where no gradients are needed; the others repeat its events.

A model's layers of one class, with parameters and inputs of the same shapes, allocate and free the same sizes in the
same order. Of each pass through them, such as a decoding step of `generate`, the first layer runs as it is; for the
others the allocator sees the same requests one by one, the cache's layer gets tensors of the same shapes, and the
model's code does not run. Layers that read values, keep what they allocate elsewhere, have hooks, or take arguments
that are not plain run as they are.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ligerprof.runs.recording.saved import storage_address
from ligerprof.simulated_gpu.device import Device, Tape
from ligerprof.simulated_gpu.plans import GPU, functions
from ligerprof.simulated_gpu.values import Values
from ligerprof.snapshots.writer import EventContext
from ligerprof.torch_memory.allocator.caching import segment_bytes

# fewer layers are not worth a look
_LEAST_LAYERS = 3
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_always_called",
)
# of a module's own dictionary: looked at in another way, or without effect on the forward pass
_SKIPPED = frozenset(
    [
        *_HOOKS,
        *("_parameters", "_buffers", "_modules", "layer_idx", "_is_full_backward_hook", "_non_persistent_buffers_set"),
        *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks"),
        *("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    ]
)
_NUMBER = re.compile(r"\.\d+\.")
_original: Any = nn.Module._call_impl
# the Siblings of this process: a closure over it would break the graphs of compiled functions
_installed: list[Any] = []


class _NotAlikeError(Exception):
    """A module or an argument has no key."""


class _Made(NamedTuple):
    """A tensor in a new block: the number of its event, and how it shows the block."""

    number: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int


class _Given(NamedTuple):
    """An argument, by its number among the tensors."""

    number: int


class _Step(NamedTuple):
    """An event to repeat.

    Attributes:
        number: of the event that allocated the block.
        size_bytes: requested; 0 to free it.
        replaced: names of the cache's attributes that show a block from before the call, to free it.
        is_kept: whether a tensor shows the block after the call.
    """

    number: int
    size_bytes: int
    context: EventContext
    replaced: tuple[str, ...]
    is_kept: bool


class _Pass(NamedTuple):
    """What a layer did.

    Attributes:
        output: what it returned, with _Made and _Given in the place of tensors.
        state: attributes of the cache's layer afterwards that were others before.
        most_bytes: what the allocator may reserve for it at most.
        temporaries: how many blocks it allocated and freed.
    """

    steps: list[_Step]
    output: Any
    state: dict[str, Any]
    made_up: Counter[Any]
    most_bytes: int
    stamp: str
    temporaries: int


def _call_or_repeat(layer: nn.Module, *arguments: Any, **named: Any) -> Any:
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not _installed[0].enabled:
        return _original(layer, *arguments, **named)
    return _installed[0]._call(layer, arguments, named)


class Siblings:
    """Repeats layers; `repeated`: how many calls of layers did not run."""

    def __init__(self, device: Device, values: Values) -> None:
        self._device, self._values = device, values
        self._passes: dict[Any, _Pass | None] = {}
        self._called: set[int] = set()
        # no layer may live longer because it is known here
        self._structures: WeakKeyDictionary[nn.Module, tuple[Any, list[ref[Tensor]], int | None]] = WeakKeyDictionary()
        self._changes = self._seen_changes = 0
        self._classes: set[type] = set()
        self.enabled, self.repeated = True, 0

    def install(self) -> None:
        """Watch the lists of layers that programs make."""
        _installed[:] = [self]
        module_list: Any = nn.ModuleList
        extend, append = module_list.extend, module_list.append
        set_attribute: Any = nn.Module.__setattr__

        def watched(change: Any) -> Any:
            def method(layers: nn.ModuleList, added: Any) -> Any:
                result = change(layers, added)
                if not torch.compiler.is_compiling():
                    _installed[0]._watch(layers)
                return result

            return method

        def counted(module: nn.Module, name: str, value: Any) -> None:
            if not torch.compiler.is_compiling():
                _installed[0]._changes += 1
            set_attribute(module, name, value)

        module_list.extend, module_list.append = watched(extend), watched(append)
        module: Any = nn.Module
        module.__setattr__ = counted

    def _watch(self, layers: Iterable[nn.Module]) -> None:
        kinds = Counter(type(layer) for layer in layers if getattr(layer, "_modules", None))
        for kind, count in kinds.items():
            if count < _LEAST_LAYERS or kind in self._classes or kind._call_impl is not _original:
                continue
            self._classes.add(kind)
            kind._call_impl = _call_or_repeat  # type: ignore[assignment, method-assign]

    def _call(self, layer: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        if id(layer) in self._called:
            self._called.clear()
            self._passes.clear()
        self._called.add(id(layer))
        given: list[Tensor] = []
        try:
            structure, weights, index = self._structure(layer)
            cache = _cache_of(index, (*arguments, *named.values()))
            own = (_key_of(arguments, given, cache), _key_of(tuple(named.items()), given, cache))
            key = (structure, self._state(weights), own, None if cache is None else _state_key(cache))
        except _NotAlikeError:
            return _original(layer, *arguments, **named)
        if key not in self._passes:
            output, self._passes[key] = self._record(layer, arguments, named, cache, given)
            return output
        known = self._passes[key]
        if known is None or self._device.allocator.room_bytes() < known.most_bytes:
            return _original(layer, *arguments, **named)
        return self._repeat(known, cache, given)

    def _state(self, weights: Sequence[Tensor]) -> Any:
        autocast = torch.is_autocast_enabled("cuda")
        if autocast and any(weight.dtype == torch.float32 and weight.requires_grad for weight in weights):
            # casts of weights stay in autocast's cache
            raise _NotAlikeError
        modes = (autocast, torch.get_default_dtype(), torch.is_inference_mode_enabled(), self._device.stream)
        return modes, tuple([(weight.dtype, weight.is_cuda) for weight in weights])

    def _structure(self, layer: nn.Module) -> tuple[Any, list[Tensor], int | None]:
        """What a layer consists of, its weights and its index; looked up as long as no module has changed."""
        changes = self._changes + RemovableHandle.next_id
        if changes != self._seen_changes:
            self._structures.clear()
            self._seen_changes = changes
        found = self._structures.get(layer)
        if found is None:
            weights = [ref(weight) for weight in (*layer.parameters(), *layer.buffers())]
            found = self._structures[layer] = (_structure_of(layer), weights, _index_of(layer))
        structure, kept, index = found
        if structure is None:
            raise _NotAlikeError
        return structure, [weight for reference in kept if (weight := reference()) is not None], index

    def _record(
        self, layer: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any], cache: Any, given: list[Tensor]
    ) -> tuple[Any, _Pass | None]:
        """Run a layer, and note what it does; None if that cannot be repeated."""
        device, values = self._device, self._values
        # the cache's old tensors end while the layer runs
        kept = {} if cache is None else dict(vars(cache))
        before = {name: ref(value) if isinstance(value, Tensor) else value for name, value in kept.items()}
        made_up, changes = values.made_up.copy(), self._changes
        stamp = device.stamped.stamp
        old: dict[int, tuple[str, ...]] = {}
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.is_cuda:
                old[storage_address(value)] = (*old.get(storage_address(value), ()), name)
        value = None
        kept.clear()
        with device.taping() as tape:

            def note_change(address: int) -> None:
                tape.spoiled |= all(event[1] != address for event in tape.events)

            before_change, values.on_change = values.on_change, note_change
            try:
                output = _original(layer, *arguments, **named)
            finally:
                values.on_change = before_change
        if tape.spoiled or changes != self._changes:
            return output, None
        try:
            done = _Reader(tape, values, before, given, old).read(output, {} if cache is None else vars(cache))
        except _NotAlikeError:
            return output, None
        steps, result, state = done
        most_bytes = sum(segment_bytes(step.size_bytes) for step in steps if step.size_bytes)
        temporaries = sum(step.size_bytes > 0 and not step.is_kept for step in steps)
        return output, _Pass(steps, result, state, values.made_up - made_up, most_bytes, stamp, temporaries)

    def _repeat(self, known: _Pass, cache: Any, given: Sequence[Tensor]) -> Any:
        device = self._device
        self.repeated += 1
        self._values.made_up.update(known.made_up)
        made = {item.number: item for item in _all_made((known.output, *known.state.values()))}
        blocks: dict[int, Any] = {}
        tensors: dict[int, Tensor] = {}
        old, new = known.stamp.rstrip(";"), device.stamped.stamp.rstrip(";")
        contexts: dict[int, EventContext] = {}
        take, give_back = device.repeated_calls(known.temporaries)
        for number, size_bytes, context, replaced, is_kept in known.steps:
            mine = contexts.get(id(context))
            if mine is None:
                mine = contexts[id(context)] = device.context_like(context, old, new)
            device.given = mine
            if is_kept:
                tensors[number] = _make(made[number], size_bytes)
            elif size_bytes:
                blocks[number] = take(size_bytes, mine)
            elif replaced:
                for name in replaced:
                    setattr(cache, name, None)
            else:
                give_back(blocks.pop(number), mine)
        device.given = None
        for name, value in known.state.items():
            setattr(cache, name, _shown(value, tensors, given))
        return _shown(known.output, tensors, given)


@dataclass(slots=True)
class _Reader:
    """Turns what was noted of a layer into what can be repeated."""

    tape: Tape
    values: Values
    before: Mapping[str, Any]
    given: Sequence[Tensor]
    old: Mapping[int, tuple[str, ...]]
    kept: dict[int, int] = field(default_factory=dict)

    def read(self, output: Any, after: Mapping[str, Any]) -> tuple[list[_Step], Any, dict[str, Any]]:
        open_blocks: dict[int, int] = {}
        read: list[tuple[int, int, EventContext, tuple[str, ...]]] = []
        for index, (size_bytes, address, context) in enumerate(self.tape.events):
            if size_bytes:
                open_blocks[address] = index
                read.append((index, size_bytes, context, ()))
            elif address in open_blocks:
                read.append((open_blocks.pop(address), 0, context, ()))
            elif address in self.old:
                read.append((index, 0, context, self.old[address]))
            else:
                raise _NotAlikeError
        self.kept = open_blocks
        result = self._described(output)
        state = {
            name: self._described(value)
            for name, value in after.items()
            if name not in self.before or not _is_same(self.before[name], value)
        }
        reached = {item.number for item in _all_made((result, *state.values()))}
        if reached != set(open_blocks.values()) or any(name not in after for name in self.before):
            raise _NotAlikeError
        return [_Step(*step, step[0] in reached and step[1] > 0) for step in read], result, state

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            for index, tensor in enumerate(self.given):
                if tensor is value:
                    return _Given(index)
            made = self.kept.get(storage_address(value)) if value.is_cuda and type(value) is Tensor else None
            if made is None or self.values.known(value) is not None:
                raise _NotAlikeError
            if self.tape.events[made][0] % value.element_size():
                raise _NotAlikeError
            return _Made(made, value.shape, value.stride(), value.dtype, int(value.storage_offset()))
        if type(value) is tuple:
            return tuple([self._described(item) for item in value])
        if isinstance(value, _PLAIN):
            return value
        raise _NotAlikeError


def _make(made: _Made, size_bytes: int) -> Tensor:
    """A tensor in a new block of this size."""
    if made.offset == 0 and made.shape.numel() * made.dtype.itemsize == size_bytes:
        return torch.empty_strided(made.shape, made.strides, dtype=made.dtype, device=GPU)
    return functions.empty(size_bytes // made.dtype.itemsize, dtype=made.dtype, device=GPU)


def _shown(value: Any, tensors: Mapping[int, Tensor], given: Sequence[Tensor]) -> Any:
    kind = type(value)
    if kind is _Given:
        return given[value.number]
    if kind is _Made:
        whole = tensors[value.number]
        if whole.dtype != value.dtype:
            whole = whole.view(value.dtype)
        if whole.shape == value.shape and whole.stride() == value.strides:
            return whole
        return whole.as_strided(value.shape, value.strides, value.offset)
    return tuple([_shown(item, tensors, given) for item in value]) if kind is tuple else value


def _all_made(value: Any) -> Iterator[_Made]:
    if type(value) is _Made:
        yield value
    elif type(value) is tuple:
        for item in value:
            yield from _all_made(item)


def _is_same(before: Any, value: Any) -> bool:
    return (before() is value) if isinstance(before, ref) else before is value


def _structure_of(layer: nn.Module) -> Any:
    """What decides about a layer's forward pass, besides its inputs; None if that cannot be told."""
    parts: list[Any] = []
    try:
        for name, module in layer.named_modules():
            if any(getattr(module, hooks, None) for hooks in _HOOKS):
                return None
            weights = [
                (key, None if tensor is None else (type(tensor), tensor.shape, tensor.stride(), tensor.requires_grad))
                for key, tensor in (*module._parameters.items(), *module._buffers.items())
            ]
            own = [(key, _attribute_key(item)) for key, item in vars(module).items() if key not in _SKIPPED]
            parts.append((name, type(module), tuple(weights), tuple(own)))
    except _NotAlikeError:
        return None
    return tuple(parts)


def _attribute_key(value: Any) -> Any:
    key: Any = id(value)
    if isinstance(value, str):
        # some packages keep a module's dotted name in it
        key = _NUMBER.sub(".", value)
    elif isinstance(value, _PLAIN):
        key = value
    elif isinstance(value, Tensor):
        key = value.shape, value.dtype, value.device
    elif isinstance(value, (list, tuple)):
        key = tuple([_attribute_key(item) for item in value])
    elif isinstance(value, dict):
        key = tuple([(name, _attribute_key(item)) for name, item in value.items()])
    elif isinstance(value, partial):
        key = value.func, _attribute_key(value.args), _attribute_key(value.keywords)
    # anything else is alike if it is the same, such as a configuration or a function
    return type(value), key


def _key_of(value: Any, given: list[Tensor], cache: Any) -> Any:
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        given.append(value)
        return value.shape, value.stride(), value.dtype, value.is_cuda, value.storage_offset()
    if kind is tuple:
        return tuple([_key_of(item, given, cache) for item in value])
    if isinstance(value, _PLAIN):
        return kind, value
    if cache is not None and hasattr(value, "layers"):
        # the cache, whose layer has a key of its own
        return kind, id(value)
    raise _NotAlikeError


def _cache_of(index: int | None, values: Iterable[Any]) -> Any:
    """The layer of transformers' cache that a model's layer writes to, None without a cache."""
    module = sys.modules.get("transformers.cache_utils")
    caches = [] if module is None else [value for value in values if isinstance(value, module.Cache)]
    if not caches:
        return None
    # a cache that consists of caches, such as an encoder's and a decoder's, has no layers of its own
    layers = getattr(caches[0], "layers", ())
    if len(caches) > 1 or index is None or index >= len(layers):
        raise _NotAlikeError
    return layers[index]


def _index_of(layer: nn.Module) -> int | None:
    """The index of a layer in transformers' cache, None if it has none or several."""
    indices = {part.__dict__.get("layer_idx") for part in layer.modules()} - {None}
    index = indices.pop() if len(indices) == 1 else None
    return index if isinstance(index, int) else None


def _state_key(cache: Any) -> Any:
    given: list[Tensor] = []
    return type(cache), tuple([(name, _key_of(value, given, None)) for name, value in vars(cache).items()])
