"""One training step from the first operation to the last."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ligerprof.analyzers.estimate.gathered import GatheringHooks
from ligerprof.analyzers.estimate.hooks import Hooks
from ligerprof.analyzers.estimate.meter import Meter
from ligerprof.analyzers.estimate.micro_batch import MicroBatch
from ligerprof.analyzers.estimate.partitioned import PartitionedHooks, outer_ranks
from ligerprof.analyzers.estimate.placement import Placement, torch_placement
from ligerprof.analyzers.estimate.recording import Recording, recording_after
from ligerprof.analyzers.estimate.replicated import ReplicatedHooks
from ligerprof.analyzers.estimate.sharded import sharding_hooks
from ligerprof.analyzers.estimate.static import input_sizes, make_weights
from ligerprof.analyzers.estimate.tensors import Weight
from ligerprof.analyzers.estimate.traced_batch import TracedMicroBatch
from ligerprof.analyzers.estimate.zero import zero_placement
from ligerprof.kernels.spec import KernelSpec
from ligerprof.models.architectures import layer_index
from ligerprof.recipe.categories import Engine, GradSync, Optimizer, Step
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase, Role
from ligerprof.torch_memory.allocator.settings import parse_allocator_settings
from ligerprof.torch_memory.libraries import thread_workspace_bytes
from ligerprof.torch_memory.saved_tensors import ADDMM


class StepRun(NamedTuple):
    """One step as the estimate ran it.

    Attributes:
        peak_bytes: the most at once, without what the allocator does not split; for comparisons of alike steps.
        logits_bytes: the most that tensors of tokens times vocabulary took together.
        host_bytes: main memory that offloaded activations take.
        recording: the events after what is static was there.
    """

    peak_bytes: int
    logits_bytes: int
    host_bytes: int
    recording: Recording


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
    meter = new_meter(recipe)
    hooks = GatheringHooks(recipe, weights, meter, None)
    micro_batch = _micro_batch(recipe, kernels, weights, meter, hooks)
    micro_batch.forward()
    micro_batch.backward()
    return hooks.order


def step_kinds(recipe: TrainingRecipe) -> tuple[Step, ...]:
    """The steps whose peaks differ: only DDP's second step is unlike the first and the steady one."""
    return tuple(Step) if recipe.engine is Engine.DDP else (Step.FIRST, Step.STEADY)


def run_step(
    recipe: TrainingRecipe, kernels: Mapping[str, KernelSpec], step: Step, before: Sequence[Recording] = ()
) -> StepRun:
    """Run a step on the rank whose peak is highest.

    Args:
        before: the build of the model, and the steps so far.
    """
    runs = (_run_step(recipe, kernels, step, before, rank) for rank in outer_ranks(recipe))
    return max(runs, key=lambda run: run.peak_bytes)


def _run_step(
    recipe: TrainingRecipe, kernels: Mapping[str, KernelSpec], step: Step, before: Sequence[Recording], rank: int
) -> StepRun:
    first = step is Step.FIRST
    weights = make_weights(recipe)
    placement = place(recipe, weights.values(), first=first, rank=rank)
    meter = new_meter(recipe)
    _hold_static(meter, recipe, weights, placement, first=first)
    recording = meter.recording = recording_after(before)
    recording.begin(Phase.FORWARD)
    meter.start()
    hooks = hooks_of(recipe, kernels, weights, meter, step, rank=rank)
    hooks.start_step()
    offloaded_bytes = 0
    if first:
        meter.expect_workspaces(workspace_sizes(recipe, weights), recipe.gpu_spec.cublas_workspace_bytes)
    for reduces in _micro_batches(recipe):
        hooks.reduces = reduces
        recording.micro_batches.append(len(recording.events))
        micro_batch = _micro_batch(recipe, kernels, weights, meter, hooks)
        _run_phase(meter, micro_batch.forward, Phase.FORWARD)
        _run_phase(meter, micro_batch.backward, Phase.BACKWARD)
        offloaded_bytes = micro_batch.offloaded_bytes
        meter.add(placement.last_reduction)
        meter.add(placement.last_reduction, times=-1)
    recording.micro_batches.append(len(recording.events))
    if isinstance(hooks, GatheringHooks):
        recording.modules = hooks.order
    hooks.end_step()
    if recipe.optimizer is not Optimizer.NONE:
        _update(meter, placement, first=first)
    return StepRun(meter.peak_bytes, meter.logits_peak_bytes, offloaded_bytes, recording)


def new_meter(recipe: TrainingRecipe) -> Meter:
    """A meter by the recipe's settings of the allocator."""
    return Meter(parse_allocator_settings(recipe.alloc_conf).rules)


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


def _hold_static(
    meter: Meter, recipe: TrainingRecipe, weights: Mapping[str, Weight], placement: Placement, *, first: bool
) -> None:
    """Put down what is there when the step begins."""
    meter.add(placement.resident)
    meter.add({Role.INPUTS: sum(input_sizes(recipe))})
    if recipe.spec.tape is not None:
        meter.add({Role.PARAMETERS: sum(recipe.spec.tape.buffers)})
    if not first:
        meter.add(placement.states)
        meter.add({Role.LIBRARY_WORKSPACE: sum(workspace_sizes(recipe, weights).values())})


def _update(meter: Meter, placement: Placement, *, first: bool) -> None:
    """The optimizer's step: what ran is gone, and what the step itself makes comes and goes."""
    if placement.gradients_at_update is not None:
        meter.settle(Role.GRADIENTS, placement.gradients_at_update)
    recording, meter.recording = meter.recording, Recording()
    recording.begin(Phase.OPTIMIZER)
    _record_update(recording, placement, first=first)
    for made in placement.updates:
        meter.add(made)
        meter.add(made, times=-1)


def _record_update(recording: Recording, placement: Placement, *, first: bool) -> None:
    if placement.record_update is not None:
        placement.record_update(recording)
        return
    if (blocks := placement.blocks) is not None:
        if first:
            recording.run(blocks.creation, Role.OPTIMIZER_TEMPORARIES)
            recording.keep(blocks.states, Role.OPTIMIZER_STATES)
        recording.run(blocks.update, Role.OPTIMIZER_TEMPORARIES)
        return
    # a first step creates the states of one part after another
    left_bytes = sum(placement.states.values()) if first else 0
    for made in placement.updates:
        states_bytes = made.get(Role.OPTIMIZER_STATES, 0)
        new_bytes = states_bytes - (sum(placement.states.values()) - left_bytes)
        recording.keep([new_bytes] if first and new_bytes > 0 else [], Role.OPTIMIZER_STATES)
        left_bytes -= max(new_bytes, 0)
        others = [(size, role) for role, size in made.items() if size > 0 and role is not Role.OPTIMIZER_STATES]
        for number in [recording.allocate(size_bytes, role) for size_bytes, role in others]:
            recording.free(number)
    recording.keep([left_bytes] if left_bytes > 0 else [], Role.OPTIMIZER_STATES)


def _run_phase(meter: Meter, run: Callable[[], None], thread: Phase) -> None:
    """Run forward or backward; each has a thread of its own, whose first product takes a workspace."""
    meter.recording.begin(thread)
    with meter.in_thread(thread):
        run()
