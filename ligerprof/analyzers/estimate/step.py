"""One training step from the first operation to the last: the highest moment of each phase."""

from collections.abc import Mapping
from dataclasses import dataclass

from ligerprof.analyzers.estimate.meter import Meter
from ligerprof.analyzers.estimate.micro_batch import MicroBatch
from ligerprof.analyzers.estimate.static import (
    StaticBytes,
    input_sizes,
    make_weights,
    static_bytes,
)
from ligerprof.kernels.spec import KernelMemory
from ligerprof.recipe import TrainingRecipe
from ligerprof.roles import MemoryBreakdown, Phase, Role


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


def step_peaks(recipe: TrainingRecipe, kernels: Mapping[str, KernelMemory], *, first: bool) -> StepPeaks:
    """The highest moment of each phase of a step.

    Args:
        first: the first step, which finds no optimizer states; the steady one otherwise.
    """
    weights = make_weights(recipe)
    static = static_bytes(recipe, weights.values())
    meter = Meter()
    _place_static(meter, recipe, static, first=first)
    peaks: dict[Phase, MemoryBreakdown] = {}
    # gradients are whole from the second micro-batch on, and no later one differs from it
    for micro_step in range(min(recipe.grad_accum, 2)):
        workspace_bytes = recipe.gpu_spec.cublas_workspace_bytes if first and micro_step == 0 else 0
        _micro_step(meter, MicroBatch(recipe, weights, kernels, meter), workspace_bytes, peaks)
    if recipe.optimizer != "none":
        meter.start()
        if first:
            meter.add(static.optimizer)
        meter.add(static.foreach)
        _note(peaks, Phase.OPTIMIZER, meter.peak())
    return StepPeaks(phases=peaks, planes_bytes=meter.planes_peak_bytes)


def _place_static(meter: Meter, recipe: TrainingRecipe, static: StaticBytes, *, first: bool) -> None:
    meter.add(static.weights)
    if not first:
        meter.add(static.optimizer)
    for size_bytes in input_sizes(recipe):
        meter.take(size_bytes, Role.INPUTS)
    # one cuBLAS workspace a thread that calls it: the forward thread's, then autograd's
    meter.add({Role.LIBRARY_WORKSPACE: recipe.gpu_spec.cublas_workspace_bytes}, times=1 if first else 2)


def _micro_step(
    meter: Meter, micro_batch: MicroBatch, workspace_bytes: int, peaks: dict[Phase, MemoryBreakdown]
) -> None:
    """Note the peaks of one micro-batch; the backward thread's workspace comes with its first product."""
    meter.start()
    micro_batch.forward()
    _note(peaks, Phase.FORWARD, meter.peak())
    meter.start()
    meter.add({Role.LIBRARY_WORKSPACE: workspace_bytes})
    micro_batch.backward()
    _note(peaks, Phase.BACKWARD, meter.peak())


def _note(peaks: dict[Phase, MemoryBreakdown], phase: Phase, peak: MemoryBreakdown) -> None:
    if phase not in peaks or peak.total_bytes > peaks[phase].total_bytes:
        peaks[phase] = peak
