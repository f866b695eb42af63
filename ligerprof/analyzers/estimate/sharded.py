"""FSDP's hooks: what it gathers before a module runs, frees after it, and reduces once its gradients are there.

They follow torch/distributed/fsdp of torch 2.13 call by call: of FSDP2, _fully_shard/_fsdp_param_group.py and
_fsdp_state.py; of FSDP1, _runtime_utils.py and _flat_param.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ligerprof.analyzers.estimate.groups import Group, groups
from ligerprof.analyzers.estimate.hooks import Hooks, Module, Part
from ligerprof.analyzers.estimate.meter import Allocation, Meter, Stream
from ligerprof.analyzers.estimate.places import WHOLE
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.analyzers.estimate.traced import traced_layers
from ligerprof.recipe.categories import BackwardPrefetch, Engine, Offload, Step
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.torch_memory.distributed import FlatSizes, ShardedParameter
from ligerprof.torch_memory.dtypes import DTYPE_BYTES


@dataclass(slots=True, eq=False)
class _State:
    """What a group holds now.

    Attributes:
        gathered: its parameters, copied out of the gathering; empty while they are sharded.
        gradient: this rank's share of its gradients.
        accumulated: whole gradients of earlier micro-batches in the dtype of the reduction.
        is_reduced: whether the current backward pass has reduced or accumulated its gradients.
        ends_with_root: whether not all of its modules ran, so that the root's hooks take care of it.
    """

    group: Group
    gathered: list[Allocation] = field(default_factory=list)
    gradient: Allocation | None = None
    accumulated: dict[int, Allocation] = field(default_factory=dict)
    is_reduced: bool = False
    ends_with_root: bool = False


class _Buffers:
    """The buffers of gatherings and reductions, which belong to no part of the model."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def take(self, size_bytes: int, stream: Stream) -> Allocation:
        """Allocate a buffer."""
        place, self._meter.place = self._meter.place, WHOLE
        block = self._meter.take(size_bytes, Role.COMMUNICATION, stream)
        self._meter.place = place
        return block

    def forget(self, block: Allocation | None) -> None:
        """Free a buffer, if there is one."""
        if block is not None:
            self._meter.drop(block)


class ShardedHooks(Hooks):
    """FSDP2 on one rank.

    Args:
        groups: the groups, the root's first.
    """

    def __init__(self, recipe: TrainingRecipe, groups: Sequence[Group], meter: Meter) -> None:
        self._recipe, self._meter = recipe, meter
        buffers = _Buffers(meter)
        self._take, self._forget = buffers.take, buffers.forget
        self._states = [_State(group) for group in groups]
        self._order: list[_State] = []
        self._previous_gather: Allocation | None = None
        self._prefetched: Allocation | None = None
        self._reduce_inputs: list[Allocation] = []
        self._until_backward_ends: list[tuple[_State, Allocation]] = []
        self._repetitions = {index: each for each in traced_layers(recipe) for index in each.indices}

    def enter(self, module: Module) -> None:
        """FSDPParamGroup.pre_forward: gather, copy out, and free the previous group's gathering only then."""
        for state in self._states:
            # the first module of a group gathers for all
            if module in state.group.modules and not state.gathered:
                gather = self._gather(state)
                self._copy_out(state)
                self._forget(self._previous_gather)
                self._previous_gather = gather

    def leave(self, module: Module) -> None:
        """FSDPParamGroup.post_forward; the root's also ends groups with a module that did not run."""
        for state in self._states:
            own = module == state.group.modules[-1]
            if own or (module is Part.ROOT and state not in self._order):
                state.ends_with_root = not own
                self._order.append(state)
                if state.group.reshards:
                    self._reshard(state)
        if module is Part.ROOT:
            self._forget(self._previous_gather)
            self._previous_gather = None

    def gradient_arrives(self, module: Module) -> None:
        """FSDPParamGroup.pre_backward, on the outputs of a group's last module."""
        for state in self._states:
            if module == (Part.ROOT if state.ends_with_root else state.group.modules[-1]):
                self._gather_for_backward(state)

    def gradient_leaves(self, module: Module) -> None:
        """RegisterPostBackwardFunction.backward, on the inputs of a group's first module."""
        for state in self._states:
            if module == state.group.modules[0]:
                self._post_backward(state)

    def end_backward(self) -> None:
        """FSDPState._root_post_backward_final_callback: groups whose inputs need no gradient, then what was kept."""
        for state in self._states:
            if not state.is_reduced:
                self._post_backward(state)
            state.is_reduced = False
        for block in self._reduce_inputs:
            self._meter.drop(block)
        for state, block in self._until_backward_ends:
            self._drop_repeated(state, block)
        self._forget(self._prefetched)
        self._prefetched = None
        self._reduce_inputs, self._until_backward_ends, self._order = [], [], []

    def _drop_repeated(self, state: _State, block: Allocation) -> None:
        """Drop what each layer that a group's layer represents holds."""
        module = state.group.modules[0]
        repetition = None if isinstance(module, Part) else self._repetitions.get(module)
        if repetition is None:
            self._meter.drop(block)
            return
        drop = partial(self._meter.drop, block)
        self._meter.repeat(repetition.times, drop, first_layer=repetition.first, backward=True)

    def _gather_for_backward(self, state: _State) -> None:
        """Gather unless the group before has, free the buffer once it is copied out, and prefetch the next group."""
        if not state.gathered:
            gather = self._prefetched or self._gather(state)
            self._prefetched = None
            self._copy_out(state)
            self._forget(gather)
        index = self._order.index(state)
        if index and not self._order[index - 1].gathered:
            self._prefetched = self._gather(self._order[index - 1])

    def _gather(self, state: _State) -> Allocation | None:
        """FSDPParamGroup.unshard: the all-gather's output; None on one rank, which copies its shards."""
        if self._recipe.shards == 1:
            return None
        inputs = list(self._gather_inputs(state))
        gather = self._take(state.group.sizes.gather_bytes, Stream.GATHER)
        for block in inputs:
            self._meter.drop(block)
        return gather

    def _gather_inputs(self, state: _State) -> Iterator[Allocation]:
        """_get_param_all_gather_inputs: one cast of all shards, or each shard's copy from main memory."""
        sizes = state.group.sizes
        if self._recipe.offload is not Offload.NONE:
            for parameter in sizes.parameters:
                yield self._moved_and_cast(parameter, Stream.GATHER)
        elif sizes.cast_bytes:
            yield self._take(sizes.cast_bytes, Stream.GATHER)

    def _moved_and_cast(self, parameter: ShardedParameter, stream: Stream) -> Allocation:
        """FSDPParam.all_gather_inputs of a shard in main memory."""
        moved = self._take(parameter.storage_bytes, stream)
        if not parameter.is_cast:
            return moved
        cast = self._take(parameter.padded_elements * parameter.gathered_bytes, stream)
        self._meter.drop(moved)
        return cast

    def _copy_out(self, state: _State) -> None:
        """foreach_all_gather_copy_out; one rank copies each shard itself (FSDPParamGroup.wait_for_unshard)."""
        alone, offloaded = self._recipe.shards == 1, self._recipe.offload is not Offload.NONE
        previous: Allocation | None = None
        for parameter in state.group.sizes.parameters:
            copied: Allocation | None = None
            if alone and offloaded:
                copied = self._moved_and_cast(parameter, Stream.COMPUTE)
            elif alone and parameter.is_cast:
                copied = self._take(parameter.padded_elements * parameter.gathered_bytes, Stream.COMPUTE)
            self._forget(previous)
            previous = copied
            state.gathered.append(self._take(parameter.copy_out_bytes, Stream.COMPUTE))
        self._forget(previous)

    def _reshard(self, state: _State) -> None:
        for block in state.gathered:
            self._meter.drop(block)
        state.gathered = []

    def _post_backward(self, state: _State) -> None:
        """FSDPParamGroup.post_backward."""
        state.is_reduced = True
        for weight in state.group.weights:
            if id(weight) in state.accumulated and weight.gradient is not None:
                self._meter.drop(_taken_gradient(weight))
        self._reshard(state)
        if not self.reduces:
            self._accumulate(state)
            return
        gradients = list(self._taken_gradients(state))
        for block in self._reduce_inputs:
            self._meter.drop(block)
        self._reduce_inputs = []
        if gradients:
            self._reduce(state, gradients)

    def _taken_gradients(self, state: _State) -> Iterator[Allocation]:
        """The group's gradients in the order of its parameters."""
        for weight in state.group.weights:
            if id(weight) in state.accumulated:
                yield state.accumulated.pop(id(weight))
            elif weight.gradient is not None:
                yield _taken_gradient(weight)

    def _accumulate(self, state: _State) -> None:
        """FSDPParam.to_accumulated_grad_if_needed: whole gradients are cast to the dtype of the reduction, and kept."""
        width = DTYPE_BYTES[self._recipe.reduction_dtype]
        if self._recipe.reduction_dtype == self._recipe.gathered_dtype:
            return
        for weight in state.group.weights:
            if weight.gradient is not None:
                narrow = _taken_gradient(weight)
                self._meter.place = state.group.place
                state.accumulated[id(weight)] = self._meter.take(weight.elements * width, Role.GRADIENTS)
                self._meter.drop(narrow)

    def _reduce(self, state: _State, gradients: Sequence[Allocation]) -> None:
        """foreach_reduce: one input of all gradients, one output, which stays or is cast, added or moved.

        A loop over the gradients leaves the last one in its variable until the function returns.
        """
        sizes = state.group.sizes
        reduce_input = self._take(sizes.reduce_input_bytes, Stream.COMPUTE)
        last = self._meter.keep(gradients[-1]) if self._recipe.shards > 1 else None
        for block in gradients:
            self._meter.drop(block)
        self._reduce_inputs.append(reduce_input)
        self._meter.place = state.group.place
        is_cast = self._recipe.reduction_dtype != self._recipe.weight_dtype
        output = self._meter.take(
            sizes.reduce_output_bytes, Role.COMMUNICATION if is_cast else Role.GRADIENTS, Stream.REDUCE
        )
        if self._recipe.replicate > 1:
            # FSDPParamGroup._all_reduce_state keeps what is reduced among the replicas
            self._until_backward_ends.append((state, self._meter.keep(output)))
        gradient = output
        if is_cast:
            gradient = self._meter.take(sizes.gradient_bytes, Role.GRADIENTS, Stream.REDUCE)
            self._meter.drop(output)
        self._forget(last)
        if state.gradient is None and self._recipe.offload is Offload.NONE:
            state.gradient = gradient
        else:
            self._meter.drop(gradient)


@dataclass(slots=True, eq=False)
class _Unit:
    """What a unit of FSDP1 holds now.

    Attributes:
        gathered: the gathered tensor, which its parameters are views of.
        gradient: this rank's part of its gradient.
        whole: the whole gradient of earlier micro-batches, which reduced none.
        is_behind: whether its backward is still to come, so that its tensor may be gathered in advance.
        is_done: whether the current backward pass has its gradient.
    """

    group: Group
    sizes: FlatSizes
    gathered: Allocation | None = None
    gradient: Allocation | None = None
    whole: Allocation | None = None
    is_behind: bool = False
    is_done: bool = False


class FlatHooks(Hooks):
    """FSDP1 on one rank.

    Args:
        groups: the groups, the root's first.
    """

    # parameters are views that are made after the gathering, on its stream
    weights_stream = Stream.GATHER

    def __init__(self, recipe: TrainingRecipe, groups: Sequence[Group], meter: Meter, step: Step) -> None:
        self._recipe, self._meter, self._is_new = recipe, meter, step is Step.FIRST
        buffers = _Buffers(meter)
        self._take, self._forget = buffers.take, buffers.forget
        self._units = [_Unit(group, group.sizes) for group in groups if isinstance(group.sizes, FlatSizes)]
        self._order: list[_Unit] = []

    def enter(self, module: Module) -> None:
        """_root_pre_forward and _pre_forward_unshard."""
        if module is Part.ROOT and self._is_new:
            self._initialize()
        for unit in self._of(module):
            self._gather(unit)

    def _initialize(self) -> None:
        """FlatParamHandle.init_flat_param_attributes: tensors of the whole sizes, whose storages are freed at once."""
        self._is_new = False
        for unit in self._units:
            sizes = unit.sizes
            alone = (sizes.gather_bytes,)
            for size_bytes in (sizes.cast_bytes, sizes.gather_bytes, sizes.whole_bytes) if sizes.cast_bytes else alone:
                self._forget(self._take(size_bytes, Stream.COMPUTE))

    def leave(self, module: Module) -> None:
        """_post_forward_reshard."""
        for unit in self._of(module):
            self._order.append(unit)
            unit.is_behind = True
            if unit.group.reshards:
                self._free(unit)

    def gradient_arrives(self, module: Module) -> None:
        """_pre_backward_hook."""
        for unit in self._of(module):
            self._gather(unit)
            unit.is_behind = False
            self._gather_in_advance(unit, BackwardPrefetch.PRE)

    def gradient_leaves(self, module: Module) -> None:
        """All gradients of a unit are there, and are joined."""
        for unit in self._of(module):
            self._post_backward(unit)

    def end_backward(self) -> None:
        """The root's gradients are complete with the embedding's."""
        for unit in self._units:
            if not unit.is_done:
                self._post_backward(unit)
            unit.is_done = False
        self._order = []

    def _of(self, module: Module) -> Iterator[_Unit]:
        return (unit for unit in self._units if module in unit.group.modules)

    def _gather(self, unit: _Unit) -> None:
        """_unshard."""
        if unit.gathered is None:
            cast = self._take(unit.sizes.cast_bytes, Stream.CAST) if unit.sizes.cast_bytes else None
            unit.gathered = self._take(unit.sizes.gather_bytes, Stream.GATHER)
            self._forget(cast)

    def _gather_in_advance(self, unit: _Unit, when: BackwardPrefetch) -> None:
        """_get_handle_to_prefetch: the unit that ended its forward pass before."""
        index = self._order.index(unit)
        if index and self._order[index - 1].is_behind and self._recipe.backward_prefetch is when:
            self._gather(self._order[index - 1])

    def _free(self, unit: _Unit) -> None:
        self._forget(unit.gathered)
        unit.gathered = None

    def _post_backward(self, unit: _Unit) -> None:
        """SplitWithSizesBackward joins the gradients, on the stream of the views; then _post_backward_hook."""
        unit.is_done = True
        self._meter.place = unit.group.place
        joined = self._meter.take(unit.sizes.gather_bytes, Role.GRADIENTS, self.weights_stream)
        for weight in unit.group.weights:
            if weight.gradient is not None:
                self._meter.drop(_taken_gradient(weight))
        added = None
        if unit.whole is not None:
            # autograd holds what it has added until the hook returns
            added, joined, unit.whole = joined, unit.whole, None
        # _should_free_in_backward
        if self.reduces or self._recipe.reshard:
            self._free(unit)
        self._gather_in_advance(unit, BackwardPrefetch.POST)
        if self.reduces:
            self._reduce(unit, joined)
        else:
            unit.whole = joined
        self._forget(added)

    def _reduce(self, unit: _Unit, joined: Allocation) -> None:
        """_reduce_grad: the gradient, cast; the rank's part, cast; the sum with that of earlier micro-batches."""
        recipe, sizes, meter = self._recipe, unit.sizes, self._meter
        cast = None
        if recipe.reduction_dtype != recipe.gathered_dtype:
            cast = self._take(sizes.reduce_input_bytes, Stream.REDUCE)
        is_narrow = recipe.reduction_dtype != recipe.weight_dtype
        output = meter.take(
            sizes.reduce_output_bytes, Role.COMMUNICATION if is_narrow else Role.GRADIENTS, Stream.REDUCE
        )
        gradient = output
        if is_narrow:
            gradient = meter.take(sizes.gradient_bytes, Role.GRADIENTS, Stream.REDUCE)
            meter.drop(output)
        if unit.gradient is None:
            unit.gradient = gradient
        else:
            meter.drop(gradient)
        self._forget(cast)
        meter.drop(joined)


def sharding_hooks(recipe: TrainingRecipe, weights: Mapping[str, Weight], meter: Meter, step: Step) -> Hooks:
    """The hooks of the recipe's FSDP."""
    found = list(groups(recipe, weights))
    return (
        FlatHooks(recipe, found, meter, step) if recipe.engine is Engine.FSDP1 else ShardedHooks(recipe, found, meter)
    )


def _taken_gradient(weight: Weight) -> Allocation:
    """The weight's gradient, which the weight gives up."""
    block, weight.gradient = weight.gradient, None
    assert block is not None
    return block
