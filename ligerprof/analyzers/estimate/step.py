"""One training step from the first operation to the last: the highest moment of each phase."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ligerprof.analyzers.estimate.meter import Meter
from ligerprof.analyzers.estimate.micro_batch import MicroBatch
from ligerprof.analyzers.estimate.static import (
    CUBLAS_THREADS,
    StaticBytes,
    input_sizes,
    make_weights,
    static_bytes,
)
from ligerprof.kernels.spec import KernelSpec
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


def step_peaks(recipe: TrainingRecipe, kernels: Mapping[str, KernelSpec], *, first: bool) -> StepPeaks:
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
        micro_batch = MicroBatch(recipe, weights, kernels, meter)
        _run_phase(meter, micro_batch.forward, workspace_bytes)
        _note(peaks, Phase.FORWARD, meter.peak())
        _run_phase(meter, micro_batch.backward, workspace_bytes)
        _note(peaks, Phase.BACKWARD, meter.peak())
    if recipe.optimizer != "none":
        meter.start()
        if first:
            meter.add(static.optimizer)
        meter.add(static.foreach)
        _note(peaks, Phase.OPTIMIZER, meter.peak())
    return StepPeaks(phases=peaks, planes_bytes=meter.planes_peak_bytes)


def _place_static(meter: Meter, recipe: TrainingRecipe, static: StaticBytes, *, first: bool) -> None:
    meter.add(static.weights)
    for size_bytes in input_sizes(recipe):
        meter.take(size_bytes, Role.INPUTS)
    if not first:
        meter.add(static.optimizer)
        meter.add({Role.LIBRARY_WORKSPACE: recipe.gpu_spec.cublas_workspace_bytes}, times=CUBLAS_THREADS)


def _run_phase(meter: Meter, run: Callable[[], None], workspace_bytes: int) -> None:
    """Run forward or backward; each has a thread of its own, whose first product takes a workspace."""
    meter.start()
    meter.expect_library(workspace_bytes)
    run()


def _note(peaks: dict[Phase, MemoryBreakdown], phase: Phase, peak: MemoryBreakdown) -> None:
    if phase not in peaks or peak.total_bytes > peaks[phase].total_bytes:
        peaks[phase] = peak
