"""ZeRO-3 on one rank: weights that are gathered before a module runs and released after it, and reduced gradients.

This follows partitioned_param_coordinator.py, partition_parameters.py and stage3.py of DeepSpeed 0.19 call by call. The
first micro-batch records the order of modules and gathers on demand; later ones prefetch in that order, and release a
weight only if it is not read again soon.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ligerprof.analyzers.estimate.hooks import Hooks, Module, Part
from ligerprof.analyzers.estimate.lora import head_weight_name
from ligerprof.analyzers.estimate.meter import Allocation, Meter, Stream
from ligerprof.analyzers.estimate.operation import Operation
from ligerprof.analyzers.estimate.partition import part, weight_width
from ligerprof.analyzers.estimate.places import WHOLE
from ligerprof.analyzers.estimate.tensors import Value, Weight
from ligerprof.analyzers.estimate.traced import layer_of
from ligerprof.models.architectures import is_embedding_weight
from ligerprof.recipe.categories import Offload
from ligerprof.recipe.deepspeed import zero_settings
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role

# stage3.py, _constant_buffered_norm2: elements per norm computation, in fp64
_NORM_ELEMENTS = 250_000_000
_DOUBLE_BYTES = 8
_NEVER = -1
# the module that reads the embedding's weight
_TIED_HEAD = "tied head"


@dataclass(slots=True, eq=False)
class _Module:
    """A module with weights of its own, or none.

    Attributes:
        weights: its own, in the order of the model.
        begun: whether it was called before an operation that reads a weight.
        done: those that its operations have read, or differentiated, since it was called.
        recomputed: frozen weights that were gathered again during its backward.
    """

    name: str
    weights: list[Weight]
    begun: bool = False
    done: set[int] = field(default_factory=set)
    recomputed: list[Weight] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Call:
    """A call that gathers weights: several into one flat tensor, from which each is copied when the first is needed.

    Attributes:
        waiting: how many of the weights no module has waited for yet; the flat tensor is there until none is left.
    """

    weights: Sequence[Weight]
    flat: Allocation | None
    waiting: int
    complete: bool = False


class GatheringHooks(Hooks):
    """ZeRO-3 on one rank.

    Args:
        weights: by name.
        order: the modules in the order in which an earlier micro-batch called them, by name; None in the first one,
            which records it.
    """

    def __init__(
        self, recipe: TrainingRecipe, weights: Mapping[str, Weight], meter: Meter, order: Sequence[str] | None
    ) -> None:
        settings = zero_settings(recipe)
        self._recipe, self._weights, self._meter = recipe, weights, meter
        self._most_live = settings["stage3_max_live_parameters"]
        self._most_prefetched = settings["stage3_prefetch_bucket_size"]
        self._most_reduced = settings["reduce_bucket_size"]
        self._reuse_distance = settings["stage3_max_reuse_distance"]
        self._stream = Stream.GATHER if settings["overlap_comm"] else Stream.COMPUTE
        smallest = settings["stage3_param_persistence_threshold"]
        self._persistent = {id(weight) for weight in weights.values() if weight.elements <= smallest}
        self._modules = dict(_modules(recipe, weights))
        self._of_weight: dict[int, _Module] = {}
        for module in self._modules.values():
            for weight in module.weights:
                self._of_weight.setdefault(id(weight), module)
        self._external = _external(recipe, weights)
        self._tied: Weight | None = None
        self._head: _Module | None = None
        if recipe.spec.tape is None:
            weight = weights[head_weight_name(recipe.spec, weights)]
            head = self._modules.get(_TIED_HEAD, self._of_weight[id(weight)])
            self._tied = weight if head.name == _TIED_HEAD else None
            # a fused loss runs in the head's call
            self._head = head if "flce" in recipe.kernels and not self._external else None
        # a layer of a traced model is one module
        self._by_parts = recipe.spec.tape is not None
        self._starts_gathered = order is not None
        self._there: dict[int, Allocation | None] = {}
        self._calls: dict[int, _Call] = {}
        self._active: dict[int, set[str]] = {}
        self._backward_modules: dict[str, _Module] = {}
        self._in_backward = False
        self._norm: _Module | None = None
        self._last_name = ""
        self._live = self._at = 0
        self._recorded: list[str] = []
        self._order: Sequence[_Module] = ()
        self._uses: dict[int, list[int]] = {}
        self._passed: Sequence[int] = ()
        self._queue: deque[tuple[Weight, int]] = deque()
        self._fetched_for: dict[int, int] = {}
        self._held: list[Weight] = []
        self._filled = 0
        if order is not None:
            self._follow(order)

    @property
    def order(self) -> Sequence[str]:
        """The order of modules in the last micro-batch."""
        return tuple(self._recorded)

    def start_step(self) -> None:
        """_post_step of the step before gathers the persistent weights, each into its own tensor."""
        if self._starts_gathered:
            for weight in self._weights.values():
                if id(weight) in self._persistent:
                    self._there[id(weight)] = self._own_block(weight, padded=True)

    def enter(self, module: Module) -> None:
        """The model's forward begins with reset_step; a traced model's parts are modules."""
        if module is Part.ROOT:
            if self._recorded and not self._order:
                self._follow(self.order)
            self._reset()
            self._fetch(self._modules[""], forward=True)
        elif self._by_parts:
            self._fetch(self._part(module), forward=True)
            self._end_early(module, forward=True)
        elif module is Part.HEAD and self._head is not None:
            self._fetch_with_outer(self._head, forward=True)

    def leave(self, module: Module) -> None:
        """A module's forward has ended."""
        if module is Part.ROOT and self._head is not None:
            self._release(self._head, forward=True)
        if module is Part.ROOT or self._by_parts:
            self._release(self._part(module), forward=True)

    def gradient_arrives(self, module: Module) -> None:
        """Before a module's backward."""
        if module is Part.ROOT:
            self._in_backward, self._last_name = True, ""
        if module is Part.ROOT or self._by_parts:
            self._fetch(self._part(module), forward=False)
            self._end_early(module, forward=False)
        if module is Part.ROOT and self._head is not None:
            self._begin_backward(self._head)
        if module is Part.EMBEDDING and not self._by_parts:
            # checkpointing has the output of a frozen one need a gradient
            embedding = self._weights[f"{self._recipe.spec.architecture.embedding}.weight"]
            self._begin_backward(self._of_weight[id(embedding)])

    def gradient_leaves(self, module: Module) -> None:
        """After a module's backward."""
        if self._by_parts:
            self._release(self._part(Part.HEAD if module is Part.NORM else module), forward=False)

    def before_module(self, weight: Weight) -> None:
        """A module's forward begins."""
        if not self._by_parts:
            module = self._of_weight[id(weight)]
            self._fetch_with_outer(module, forward=True)
            module.begun = True

    def before_read(self, operation: Operation) -> None:
        """A module's forward begins, and first that of the modules that it is in."""
        for module in self._called(operation):
            if not (module.begun or module.done):
                self._fetch_with_outer(module, forward=True)

    def after_read(self, operation: Operation) -> None:
        """A module's forward ends with the operation that reads the last of its weights."""
        for module in self._called(operation):
            if self._is_done(module, operation):
                self._release(module, forward=True)

    def block_of(self, weight: Weight) -> Allocation | None:
        """The weight's own memory."""
        return self._there.get(id(weight))

    def before_gradient(self, operation: Operation) -> None:
        """A module's backward begins."""
        for module in self._called(operation):
            self._end_norm()
            if self._head is not None and self._head.name in self._backward_modules:
                self._release(self._head, forward=False)
            self._begin_backward(module)

    def after_gradient(self, operation: Operation) -> None:
        """A module's backward ends, if its input needs a gradient; otherwise no hook of it runs."""
        flows = any(isinstance(item, Value) and item.needs_gradient for item in operation.differentiable)
        for module in self._called(operation):
            if not (self._is_done(module, operation) and flows):
                continue
            if module.recomputed and all(len(weight.shape) == 1 for weight in module.weights):
                # a norm's input has no gradient yet; it holds what its backward recomputed
                self._norm = module
            else:
                self._release(module, forward=False)

    def _end_norm(self) -> None:
        if self._norm is not None:
            self._release(self._norm, forward=False)
            self._norm = None

    def weight_gradient_arrives(self, weight: Weight) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: a gradient is copied to the bucket, if it fits in one."""
        if self._held and self._filled + weight.elements > self._most_reduced:
            self._reduce()
        if self._filled + weight.elements <= self._most_reduced:
            self._free_gradient(weight)
        self._held.append(weight)
        self._filled += weight.elements

    def end_backward(self) -> None:
        """independent_gradient_partition_epilogue, then release_backward_leftovers."""
        self._reduce()
        self._end_norm()
        while self._backward_modules:
            _, module = self._backward_modules.popitem()
            self._let_go(module, {id(item) for item in (*module.weights, *module.recomputed)} - self._persistent)
        self._in_backward = False

    def end_step(self) -> None:
        """_partition_all_parameters at the start of the optimizer's step."""
        self._active.clear()
        for weight in list(self._weights.values()):
            self._wait_for(weight)
            self._drop(weight)

    def _end_early(self, module: Module, *, forward: bool) -> None:
        """On demand, a traced model's head is not there during the loss, which is in the same part."""
        if module is Part.HEAD and not self._order:
            self._release(self._part(module), forward=forward)

    def _begin_backward(self, module: _Module) -> None:
        if module.name not in self._backward_modules:
            # a recomputation stops before the end of the last module
            module.begun = False
            module.done.clear()
            self._fetch_with_outer(module, forward=False)

    def _part(self, module: Module) -> _Module:
        return self._modules["" if module is Part.ROOT else str(module)]

    def _called(self, operation: Operation) -> Iterator[_Module]:
        """The modules whose weights an operation reads."""
        if self._by_parts:
            return
        found: list[_Module] = []
        reads_values = any(isinstance(item, Value) for item in operation.differentiable)
        for item in operation.differentiable:
            module = self._of_weight.get(id(item)) if isinstance(item, Weight) else None
            if module is not None and item is self._tied and reads_values:
                module = self._modules[_TIED_HEAD]
            if module is not None and module.name and module not in (*found, self._head):
                found.append(module)
                yield module

    def _is_done(self, module: _Module, operation: Operation) -> bool:
        module.done.update(id(item) for item in operation.differentiable if isinstance(item, Weight))
        done = all(id(weight) in module.done for weight in module.weights)
        if done:
            module.begun = False
            module.done.clear()
        return done

    def _fetch_with_outer(self, module: _Module, *, forward: bool) -> None:
        names = module.name.split(".")
        for name in (".".join(names[:count]) for count in range(1, len(names))):
            outer = self._modules.get(name)
            if outer is not None and not f"{self._last_name}.".startswith(f"{name}."):
                self._fetch(outer, forward=forward)
        self._last_name = module.name
        self._fetch(module, forward=forward)

    def _reset(self) -> None:
        """reset_step."""
        for weight in [weight for weight in self._weights.values() if id(weight) in self._calls]:
            self._wait_for(weight)
            self._remove(weight)
        self._recorded.clear()
        self._queue = deque((weight, step) for step, module in enumerate(self._order) for weight in module.weights)
        self._fetched_for.clear()
        self._live, self._at, self._last_name = 0, 0, ""

    def _follow(self, order: Sequence[str]) -> None:
        """construct_parameter_trace_from_module_trace."""
        self._order = [self._modules[name] for name in order]
        for step, module in enumerate(self._order):
            for weight in module.weights:
                self._uses.setdefault(id(weight), []).append(step)
        elements = (sum(weight.elements for weight in module.weights) for module in self._order)
        self._passed = (0, *accumulate(elements))

    def _fetch(self, module: _Module, *, forward: bool) -> None:
        """fetch_sub_module: gather its weights, wait for them, and prefetch those of the next modules."""
        self._recorded.append(module.name)
        if not forward:
            self._backward_modules[module.name] = module
        self._gather([weight for weight in module.weights if id(weight) not in self._there])
        for weight in module.weights:
            active = self._active.setdefault(id(weight), set())
            active.add(module.name)
            if forward and self._in_backward and self._backward_modules and not weight.trainable:
                owner = next(reversed(self._backward_modules.values()))
                owner.recomputed.append(weight)
                active.add(owner.name)
            self._wait_for(weight)
        if self._order:
            self._advance(module)
            self._prefetch()
        self._at += 1

    def _advance(self, module: _Module) -> None:
        """Take the weights of this module off the queue."""
        left = {id(weight) for weight in module.weights if self._fetched_for.get(id(weight), _NEVER) < self._at}
        count = len(left)
        while self._queue and count:
            weight, step = self._queue.popleft()
            self._fetched_for[id(weight)] = step
            count -= 1

    def _prefetch(self) -> None:
        most = min(self._most_live - self._live, self._most_prefetched)
        wanted: list[Weight] = []
        elements = 0
        while self._queue and elements < most:
            weight, step = self._queue.popleft()
            self._fetched_for[id(weight)] = max(self._fetched_for.get(id(weight), _NEVER), step)
            if id(weight) not in self._there and weight not in wanted:
                wanted.append(weight)
                elements += weight.elements
        self._gather(wanted)

    def _gather(self, weights: Sequence[Weight]) -> None:
        """all_gather_coalesced; one rank uses its partitions in place (NoGatherHandle), or copies them."""
        if not weights:
            return
        self._live += sum(weight.elements for weight in weights)
        moved, several = self._recipe.offload.moves_parameters, len(weights) > 1 and self._recipe.gpus > 1
        # on demand, the modules of a traced model's layer gather one after another
        several = several and not (self._by_parts and not self._order)
        padded = [self._padded(weight) for weight in weights]
        flat = self._take(sum(padded)) if several else None
        call = _Call(weights, flat, len(weights), complete=not several)
        for weight in weights:
            self._there[id(weight)] = None if several else self._own_block(weight, padded=True)
            self._calls[id(weight)] = call
        if moved and self._recipe.gpus > 1:
            # this rank's share, on its way from main memory to the other ranks
            shares = [self._take(size_bytes // self._recipe.gpus) for size_bytes in padded]
            for block in shares:
                self._meter.drop(block)

    def _wait_for(self, weight: Weight) -> None:
        """AllGatherCoalescedHandle.wait, which copies all weights of the call."""
        call = self._calls.pop(id(weight), None)
        if call is None:
            return
        if not call.complete:
            call.complete = True
            for each in call.weights:
                self._there[id(each)] = self._own_block(each, padded=False)
        call.waiting -= 1
        if not call.waiting and call.flat is not None:
            self._meter.drop(call.flat)

    def _own_block(self, weight: Weight, *, padded: bool) -> Allocation | None:
        if self._recipe.gpus == 1 and not self._recipe.offload.moves_parameters:
            return None
        return self._take(self._padded(weight) if padded else self._size(weight))

    def _size(self, weight: Weight) -> int:
        return weight.elements * weight.width

    def _padded(self, weight: Weight) -> int:
        return part(self._recipe, weight.elements) * self._recipe.gpus * weight.width

    def _release(self, module: _Module, *, forward: bool) -> None:
        """release_sub_module."""
        released = self._released_after(module)
        if not forward:
            released |= {id(weight) for weight in module.recomputed} - self._persistent
            self._backward_modules.pop(module.name, None)
        self._let_go(module, released)

    def _let_go(self, module: _Module, released: Iterable[int]) -> None:
        for weight in (*module.weights, *(() if self._backward_modules.get(module.name) else module.recomputed)):
            self._active.get(id(weight), set()).discard(module.name)
            if id(weight) in released and id(weight) not in self._external:
                self._remove(weight)
        if module.name not in self._backward_modules:
            module.recomputed.clear()

    def _released_after(self, module: _Module) -> set[int]:
        """__params_to_release."""
        if not self._order:
            return {id(weight) for weight in module.weights}
        return {
            id(weight)
            for weight in module.weights
            if id(weight) not in self._persistent
            and self._fetched_for.get(id(weight), _NEVER) <= self._at
            and not self._is_read_soon(weight)
        }

    def _is_read_soon(self, weight: Weight) -> bool:
        """Whether a module within the reuse distance reads a weight."""
        uses = self._uses.get(id(weight), [])
        following = bisect_left(uses, self._at)
        if following == len(uses):
            return False
        distance: int = self._passed[uses[following]] - self._passed[self._at]
        return distance < int(self._reuse_distance)

    def _remove(self, weight: Weight) -> None:
        """__release_param."""
        call = self._calls.get(id(weight))
        inflight = call is not None and not call.complete
        if id(weight) in self._there and not inflight and not self._active.get(id(weight)):
            self._drop(weight)
            self._live -= weight.elements

    def _drop(self, weight: Weight) -> None:
        block = self._there.pop(id(weight), None)
        if block is not None:
            self._meter.drop(block)

    def _reduce(self) -> None:
        """__reduce_and_partition_ipg_grads.

        Gradients are copied once more in rank order, except a single gradient that needs no padding
        (reduce_scatter_coalesced). With an offloaded optimizer, each partition is read back from main memory, and the
        last micro-batch computes its norm from a copy in fp64.
        """
        if not self._held:
            return
        width, offloaded = weight_width(self._recipe), self._recipe.offload is not Offload.NONE
        alone = len(self._held) == 1 and self._filled % self._recipe.gpus == 0
        padded = sum(part(self._recipe, weight.elements) * self._recipe.gpus for weight in self._held)
        copied = None if alone else self._take(width * padded)
        for weight in self._held if offloaded else ():
            elements = part(self._recipe, weight.elements)
            partition = self._take(width * elements)
            self._meter.touch(_DOUBLE_BYTES * min(elements, _NORM_ELEMENTS), Role.COMMUNICATION)
            self._meter.drop(partition)
        if copied is not None:
            self._meter.drop(copied)
        for weight in self._held:
            self._free_gradient(weight)
        self._held, self._filled = [], 0

    def _free_gradient(self, weight: Weight) -> None:
        if weight.gradient is not None:
            self._meter.drop(weight.gradient)
            weight.gradient = None

    def _take(self, size_bytes: int) -> Allocation:
        place, self._meter.place = self._meter.place, WHOLE
        block = self._meter.take(size_bytes, Role.COMMUNICATION, self._stream)
        self._meter.place = place
        return block


def _modules(recipe: TrainingRecipe, weights: Mapping[str, Weight]) -> Iterator[tuple[str, _Module]]:
    """Modules by name: each adapter's part is one; of a traced model, the root, each layer and what is around them."""
    found = _weights_by_module(recipe, weights) if recipe.spec.tape is None else _weights_by_part(recipe, weights)
    external = _external(recipe, weights)
    found[""] = [weight for weight in weights.values() if id(weight) in external]
    for name, own in found.items():
        yield name, _Module(name, [weight for weight in own if not name or id(weight) not in external])


def _weights_by_module(recipe: TrainingRecipe, weights: Mapping[str, Weight]) -> dict[str, list[Weight]]:
    adapted = {name.rpartition(".")[0] for name, weight in weights.items() if weight.is_adapter}
    found: dict[str, list[Weight]] = {}
    for name, weight in weights.items():
        module = name if weight.is_adapter else name.rpartition(".")[0]
        own = f"{module}.base_layer" if module in adapted and not weight.is_adapter else module
        found.setdefault(own, []).append(weight)
    for pieces in [name.split(".") for name in found]:
        # modules without weights prefetch as well; a list of layers is never called
        outer = (".".join(pieces[:count]) for count in range(1, len(pieces)))
        found |= {name: [] for name in outer if name not in (*found, recipe.spec.architecture.layers)}
    head = head_weight_name(recipe.spec, weights)
    if head != f"{recipe.spec.architecture.head}.weight":
        found[_TIED_HEAD] = [weights[head]]
    return found


def _weights_by_part(recipe: TrainingRecipe, weights: Mapping[str, Weight]) -> dict[str, list[Weight]]:
    """The weights of a traced model's layers, and of what is before and after them."""
    found: dict[str, list[Weight]] = {str(part): [] for part in (Part.EMBEDDING, Part.NORM, Part.HEAD)}
    for name, weight in weights.items():
        index, around = layer_of(recipe, name), Part.EMBEDDING if is_embedding_weight(name) else Part.HEAD
        found.setdefault(str(around if index is None else index), []).append(weight)
    return found


def _external(recipe: TrainingRecipe, weights: Mapping[str, Weight]) -> frozenset[int]:
    """The head's weight, if the model itself reads it: liger-kernel's fused loss does not call the head."""
    if recipe.providers.get("flce") != "liger":
        return frozenset()
    return frozenset({id(weights[head_weight_name(recipe.spec, weights)])})
