"""One training step from the first operation to the last: the highest moment of each phase."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ligerprof.analyzers.estimate.block_meter import meter_after
from ligerprof.analyzers.estimate.gathered import GatheringHooks
from ligerprof.analyzers.estimate.hooks import Hooks
from ligerprof.analyzers.estimate.meter import Meter, UnsplitRemainders
from ligerprof.analyzers.estimate.micro_batch import MicroBatch
from ligerprof.analyzers.estimate.partitioned import PartitionedHooks, outer_ranks
from ligerprof.analyzers.estimate.placement import Placement, torch_placement
from ligerprof.analyzers.estimate.places import spread, sums, weight_place
from ligerprof.analyzers.estimate.recording import Recording, recording_after
from ligerprof.analyzers.estimate.replicated import ReplicatedHooks
from ligerprof.analyzers.estimate.sharded import sharding_hooks
from ligerprof.analyzers.estimate.static import input_sizes, make_weights
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.analyzers.estimate.traced import traced_layers
from ligerprof.analyzers.estimate.traced_batch import TracedMicroBatch
from ligerprof.analyzers.estimate.zero import zero_placement
from ligerprof.kernels.spec import KernelSpec
from ligerprof.models.architectures import layer_index
from ligerprof.recipe.categories import Engine, GradSync, Optimizer, Step
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import MemoryBreakdown, Phase, Role
from ligerprof.torch_memory.libraries import thread_workspace_bytes
from ligerprof.torch_memory.saved_tensors import ADDMM


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPeaks:
    """One step's highest moments.

    Attributes:
        phases: who held what at the highest moment of each phase.
        places: the same by part of the model.
        remainders: blocks at those moments that the allocator may leave larger than was asked.
        logits_bytes: the most that tensors of tokens times vocabulary took together.
        host_bytes: main memory that offloaded activations take.
        recording: the events after what is static was there.
    """

    phases: Mapping[Phase, MemoryBreakdown]
    places: Mapping[Phase, Mapping[str, MemoryBreakdown]]
    remainders: Mapping[Phase, UnsplitRemainders]
    logits_bytes: int
    host_bytes: int
    recording: Recording

    @property
    def phase(self) -> Phase:
        """The phase that has the peak."""
        return max(self.phases, key=lambda phase: self.phases[phase].total_bytes)

    @property
    def peak(self) -> MemoryBreakdown:
        """Who held what at the peak of the step."""
        return self.phases[self.phase]

    @property
    def peak_remainders(self) -> UnsplitRemainders:
        """Such blocks at the peak of the step."""
        return self.remainders[self.phase]

    @property
    def peak_places(self) -> Mapping[str, MemoryBreakdown]:
        """The same by part of the model."""
        return self.places[self.phase]


def place(recipe: TrainingRecipe, weights: Iterable[Weight], *, first: bool, rank: int = 0) -> Placement:
    """Where the recipe's engine keeps weights, gradients and states, in the first step or a steady one."""
    if recipe.engine is Engine.DEEPSPEED:
        return zero_placement(recipe, weights, first=first, rank=rank)
    return torch_placement(recipe, weights, first=first)


def hooks_of(
    recipe: TrainingRecipe,
    kernels: Mapping[str, KernelSpec],
    weights: Mapping[str, Weight],
    meter: Meter,
    step: Step,
    *,
    rank: int = 0,
) -> Hooks:
    """What the recipe's engine does around modules and when gradients arrive."""
    if recipe.engine.is_fsdp:
        return sharding_hooks(recipe, weights, meter, step)
    if recipe.engine is Engine.DDP:
        return ReplicatedHooks(recipe, weights.items(), meter, step)
    if recipe.engine is Engine.DEEPSPEED and recipe.zero in (1, 2):
        return PartitionedHooks(recipe, weights.values(), meter, rank)
    if recipe.engine is Engine.DEEPSPEED and recipe.zero == 3:
        order = None if step is Step.FIRST else meter.recording.modules or _module_order(recipe, kernels)
        return GatheringHooks(recipe, weights, meter, order)
    return Hooks()


def _module_order(recipe: TrainingRecipe, kernels: Mapping[str, KernelSpec]) -> Sequence[str]:
    """The order in which a training step calls modules."""
    weights = make_weights(recipe)
    meter = meter_after(recipe, ())
    hooks = GatheringHooks(recipe, weights, meter, None)
    micro_batch = _micro_batch(recipe, kernels, weights, meter, hooks)
    micro_batch.forward()
    micro_batch.backward()
    return hooks.order


def step_kinds(recipe: TrainingRecipe) -> tuple[Step, ...]:
    """The steps whose peaks differ: only DDP's second step is unlike the first and the steady one."""
    return tuple(Step) if recipe.engine is Engine.DDP else (Step.FIRST, Step.STEADY)


def step_peaks(
    recipe: TrainingRecipe, kernels: Mapping[str, KernelSpec], step: Step, before: Sequence[Recording] = ()
) -> StepPeaks:
    """The highest moment of each phase of a step, on the rank whose peak is highest.

    Args:
        before: the build of the model, and the steps so far: where they are known block by block, the step's blocks
            have their exact sizes.
    """
    return max(
        (_step_peaks(recipe, kernels, step, before, rank) for rank in outer_ranks(recipe)),
        key=lambda peaks: peaks.peak.total_bytes,
    )


def _step_peaks(
    recipe: TrainingRecipe, kernels: Mapping[str, KernelSpec], step: Step, before: Sequence[Recording], rank: int
) -> StepPeaks:
    first = step is Step.FIRST
    weights = make_weights(recipe)
    placement = place(recipe, weights.values(), first=first, rank=rank)
    meter = meter_after(recipe, before)
    static = StaticMemory(recipe, weights, placement)
    static.place(meter, first=first)
    recording = meter.recording = recording_after(before)
    meter.start()
    hooks = hooks_of(recipe, kernels, weights, meter, step, rank=rank)
    hooks.start_step()
    highest = _Highest(meter)
    offloaded_bytes = 0
    if first:
        meter.expect_workspaces(workspace_sizes(recipe, weights), recipe.gpu_spec.cublas_workspace_bytes)
    for reduces in _micro_batches(recipe):
        hooks.reduces = reduces
        recording.micro_batches.append(len(recording.events))
        micro_batch = _micro_batch(recipe, kernels, weights, meter, hooks)
        _run_phase(meter, micro_batch.forward, Phase.FORWARD)
        highest.note(Phase.FORWARD)
        _run_phase(meter, micro_batch.backward, Phase.BACKWARD)
        offloaded_bytes = micro_batch.offloaded_bytes
        meter.add(placement.last_reduction)
        meter.add(placement.last_reduction, times=-1)
        highest.note(Phase.BACKWARD)
    recording.micro_batches.append(len(recording.events))
    if isinstance(hooks, GatheringHooks):
        recording.modules = hooks.order
    hooks.end_step()
    if recipe.optimizer is not Optimizer.NONE:
        static.update(meter, first=first)
        highest.note(Phase.OPTIMIZER)
    return StepPeaks(
        phases=highest.roles,
        places=highest.places,
        remainders=highest.remainders,
        logits_bytes=meter.logits_peak_bytes,
        host_bytes=offloaded_bytes,
        recording=recording,
    )


def _micro_batch(
    recipe: TrainingRecipe, kernels: Mapping[str, KernelSpec], weights: Mapping[str, Weight], meter: Meter, hooks: Hooks
) -> MicroBatch | TracedMicroBatch:
    if recipe.spec.tape is None:
        return MicroBatch(recipe, weights, kernels, meter, hooks)
    return TracedMicroBatch(recipe, weights, meter, hooks)


def _micro_batches(recipe: TrainingRecipe) -> tuple[bool, ...]:
    """Micro-batches that differ, and whether each reduces its gradients.

    Gradients are whole from the second one on. If only the last one reduces, it differs from those before.
    """
    if recipe.zero in (1, 2) or (recipe.grad_sync is GradSync.LAST and recipe.engine.syncs_gradients):
        return (*(False,) * min(recipe.grad_accum - 1, 2), True)
    return (True,) * min(recipe.grad_accum, 2)


def workspace_sizes(recipe: TrainingRecipe, weights: Mapping[str, Weight]) -> dict[Phase, int]:
    """Bytes that cuBLAS takes in the thread of the forward pass, and in autograd's, which also recomputes layers."""
    if (tape := recipe.spec.tape) is not None:
        sizes = tape.workspaces_of(checkpointing=recipe.checkpointing)
        return dict(zip((Phase.FORWARD, Phase.BACKWARD), sizes, strict=True))
    biased = [name for name in weights if name.endswith(".bias") and _adds_with_cublas(recipe, weights, name)]
    layers = {index for name in biased if (index := layer_index(name)) is not None}
    policies = [recipe.policy_of_layer(index) for index in layers if recipe.checkpoints_layer(index)]
    recomputes = any(policy is None or policy.every.get(ADDMM) != 1 for policy in policies)
    return {
        Phase.FORWARD: thread_workspace_bytes(recipe.gpu_spec, adds_bias=bool(biased)),
        Phase.BACKWARD: thread_workspace_bytes(recipe.gpu_spec, adds_bias=recomputes),
    }


def _adds_with_cublas(recipe: TrainingRecipe, weights: Mapping[str, Weight], bias: str) -> bool:
    """Whether cuBLAS adds a bias to a linear layer's product.

    bitsandbytes' product of int8 weights does not, nor ZeRO-3's own function (LinearFunctionForZeroStage3).
    """
    if recipe.zero == 3 and recipe.spec.architecture.linear_layers:
        return False
    # a tied head has a bias of its own, and the embedding's weight
    tied = weights[f"{recipe.spec.architecture.embedding}.weight"]
    weight = weights.get(f"{bias.removesuffix('.bias')}.weight", tied)
    return len(weight.shape) == 2 and not (weight.packed_sizes and recipe.packed_bits == 8)


class _Highest:
    """The highest moment of each phase over all micro-batches."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.roles: dict[Phase, MemoryBreakdown] = {}
        self.places: dict[Phase, Mapping[str, MemoryBreakdown]] = {}
        self.remainders: dict[Phase, UnsplitRemainders] = {}

    def note(self, phase: Phase) -> None:
        """The phase ends."""
        peak = self._meter.peak()
        if phase not in self.roles or peak.total_bytes > self.roles[phase].total_bytes:
            self.roles[phase], self.places[phase] = peak, self._meter.peak_places()
            self.remainders[phase] = self._meter.peak_remainders()


class StaticMemory:
    """What a placement puts on the meter, each part of the model with its share."""

    def __init__(self, recipe: TrainingRecipe, weights: Mapping[str, Weight], placement: Placement) -> None:
        self._recipe, self._weights, self._placement = recipe, weights, placement
        traced = traced_layers(recipe)
        placed = [(weight_place(recipe, name, traced), weight) for name, weight in weights.items()]
        trained = sums((place, weight.elements) for place, weight in placed if weight.trainable)
        self._parts = {
            Role.PARAMETERS: sums((place, sum(weight.stored_sizes)) for place, weight in placed),
            Role.GRADIENTS: trained,
            Role.OPTIMIZER_STATES: trained,
        }

    def place(self, meter: Meter, *, first: bool) -> None:
        """Put down what is there when the step begins."""
        self._add(meter, self._placement.resident)
        for size_bytes in input_sizes(self._recipe):
            meter.take(size_bytes, Role.INPUTS)
        for size_bytes in () if self._recipe.spec.tape is None else self._recipe.spec.tape.buffers:
            meter.take(size_bytes, Role.PARAMETERS)
        if not first:
            self._add(meter, {**self._placement.states, **meter.states_rounding})
            meter.add_remainders(self._placement.states_remainders)
            meter.add({Role.LIBRARY_WORKSPACE: sum(workspace_sizes(self._recipe, self._weights).values())})

    def update(self, meter: Meter, *, first: bool) -> None:
        """The optimizer's step: what ran is gone, and what the step itself makes comes and goes."""
        placement = self._placement
        if placement.gradients_at_update is not None:
            meter.settle(Role.GRADIENTS, placement.gradients_at_update)
        # the parts of the model share blocks
        recording, meter.recording = meter.recording, Recording()
        self._record_update(recording, first=first)
        meter.start()
        if first:
            meter.add_remainders(placement.states_remainders)
        meter.add_remainders(placement.update_remainders)
        for made in placement.updates:
            self._add(meter, made)
            self._add(meter, made, times=-1)

    def _record_update(self, recording: Recording, *, first: bool) -> None:
        placement = self._placement
        if placement.record_update is not None:
            placement.record_update(recording)
            return
        states = tuple(placement.states.values()) if placement.blocks is None else placement.blocks.states
        if first and placement.blocks is not None:
            recording.touch(placement.blocks.creation, Role.OPTIMIZER_TEMPORARIES)
        for size_bytes in states if first else ():
            recording.allocate(size_bytes, Role.OPTIMIZER_STATES, kept=True)
        if placement.blocks is not None:
            for sizes in placement.blocks.updates:
                recording.touch(sizes, Role.OPTIMIZER_TEMPORARIES)
            return
        for made in placement.updates:
            sizes = [size for role, size in made.items() if not (first and role is Role.OPTIMIZER_STATES)]
            recording.touch(sizes, Role.OPTIMIZER_TEMPORARIES)

    def _add(self, meter: Meter, held: Mapping[Role, int], times: int = 1) -> None:
        for role, size_bytes in held.items():
            for place, share_bytes in spread(size_bytes, self._parts.get(role, {})):
                meter.add({role: share_bytes}, times, place)


def _run_phase(meter: Meter, run: Callable[[], None], thread: Phase) -> None:
    """Run forward or backward; each has a thread of its own, whose first product takes a workspace."""
    meter.start()
    with meter.in_thread(thread):
        run()
