"""One training step from the first operation to the last: the highest moment of each phase."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ligerprof.analyzers.estimate.meter import Meter
from ligerprof.analyzers.estimate.micro_batch import MicroBatch
from ligerprof.analyzers.estimate.placement import Placement, torch_placement
from ligerprof.analyzers.estimate.static import input_sizes, make_weights
from ligerprof.analyzers.estimate.tape import Weight
from ligerprof.analyzers.estimate.zero import zero_placement
from ligerprof.kernels.spec import KernelSpec
from ligerprof.recipe import TrainingRecipe
from ligerprof.roles import MemoryBreakdown, Phase, Role
from ligerprof.snapshots.allocator_settings import parse_allocator_settings

# torch keeps one cuBLAS workspace a thread: one for forward, one for autograd's backward thread
CUBLAS_THREADS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPeaks:
    """One step's highest moments.

    Attributes:
        phases: who held what at the highest moment of each phase.
        planes_bytes: the most that tensors of tokens times vocabulary took together.
    """

    phases: Mapping[Phase, MemoryBreakdown]
    planes_bytes: int

    @property
    def phase(self) -> Phase:
        """The phase that has the peak."""
        return max(self.phases, key=lambda phase: self.phases[phase].total_bytes)

    @property
    def peak(self) -> MemoryBreakdown:
        """Who held what at the peak of the step."""
        return self.phases[self.phase]


def place(recipe: TrainingRecipe, weights: Iterable[Weight]) -> Placement:
    """Where the recipe's engine keeps weights, gradients and states."""
    return zero_placement(recipe, weights) if recipe.engine == "deepspeed" else torch_placement(recipe, weights)


def step_peaks(recipe: TrainingRecipe, kernels: Mapping[str, KernelSpec], *, first: bool) -> StepPeaks:
    """The highest moment of each phase of a step.

    Args:
        first: the first step, which finds no optimizer states; the steady one otherwise.
    """
    weights = make_weights(recipe)
    placement = place(recipe, weights.values())
    for weight in weights.values():
        weight.kept_share = placement.gradient_share
    meter = Meter(parse_allocator_settings(recipe.alloc_conf).rules)
    _place_static(meter, recipe, placement, first=first)
    peaks: dict[Phase, MemoryBreakdown] = {}
    # gradients are whole from the second micro-batch on, and no later one differs from it
    for micro_step in range(min(recipe.grad_accum, 2)):
        workspace_bytes = recipe.gpu_spec.cublas_workspace_bytes if first and micro_step == 0 else 0
        micro_batch = MicroBatch(recipe, weights, kernels, meter, placement.reduction)
        _run_phase(meter, micro_batch.forward, workspace_bytes)
        _note(peaks, Phase.FORWARD, meter.peak())
        meter.add(placement.first_backward, times=int(first))
        _run_phase(meter, micro_batch.backward, workspace_bytes)
        meter.add(placement.first_backward, times=-int(first))
        _note(peaks, Phase.BACKWARD, meter.peak())
    if recipe.optimizer != "none":
        _update(meter, placement, first=first)
        _note(peaks, Phase.OPTIMIZER, meter.peak())
    return StepPeaks(phases=peaks, planes_bytes=meter.planes_peak_bytes)


def _place_static(meter: Meter, recipe: TrainingRecipe, placement: Placement, *, first: bool) -> None:
    meter.add(placement.resident)
    for size_bytes in input_sizes(recipe):
        meter.take(size_bytes, Role.INPUTS)
    if not first:
        meter.add(placement.states)
        meter.add(placement.running)
        meter.add({Role.LIBRARY_WORKSPACE: recipe.gpu_spec.cublas_workspace_bytes}, times=CUBLAS_THREADS)


def _run_phase(meter: Meter, run: Callable[[], None], workspace_bytes: int) -> None:
    """Run forward or backward; each has a thread of its own, whose first product takes a workspace."""
    meter.start()
    meter.expect_library(workspace_bytes)
    run()


def _update(meter: Meter, placement: Placement, *, first: bool) -> None:
    """The optimizer's step: what ran is gone, states are there now, and what the step itself makes."""
    if not first:
        meter.add(placement.running, times=-1)
    if placement.gradients_at_update is not None:
        meter.add({Role.GRADIENTS: placement.gradients_at_update - meter.held[Role.GRADIENTS]})
    meter.start()
    if first:
        meter.add(placement.states)
        meter.add(placement.first_update)
        meter.add(placement.first_update, times=-1)
    meter.add(placement.update)


def _note(peaks: dict[Phase, MemoryBreakdown], phase: Phase, peak: MemoryBreakdown) -> None:
    if phase not in peaks or peak.total_bytes > peaks[phase].total_bytes:
        peaks[phase] = peak
