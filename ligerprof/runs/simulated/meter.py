"""Read the simulated allocator's counters per phase, and stamp its events."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ligerprof.roles import STEP_PHASES, Phase
from ligerprof.runs.recording.stamping import Stamper
from ligerprof.simulated_gpu.device import Device


@dataclass(slots=True)
class StepFigures:
    """Highest allocated and reserved bytes of one training step and of its phases.

    Attributes:
        evaluation_reserved_bytes: those of an evaluation after the step, which is one of `phases` and not of the step.
    """

    peak_bytes: int = 0
    reserved_bytes: int = 0
    evaluation_reserved_bytes: int | None = None
    phases: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(STEP_PHASES, 0))
    after_phase: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(STEP_PHASES, 0))


class PhaseMeter:
    """The observer of simulated training steps.

    Args:
        stamper: stamps the events that are recorded, or None.
        is_compiled: whether the loss is part of a compiled graph, which is one autograd node.

    Attributes:
        step: number of the current step, 0 during the build.
        phase_now: the current phase, or the one in which memory ran out.
        steps: figures of all steps so far.
    """

    def __init__(self, device: Device, stamper: Stamper | None, *, is_compiled: bool = False) -> None:
        self._device, self._stamper, self._is_compiled = device, stamper, is_compiled
        self.step = 0
        self.phase_now = Phase.BUILD
        self.steps: list[StepFigures] = []

    def next_step(self) -> None:
        """Start the next step."""
        self.step += 1
        self.steps.append(StepFigures())

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Measure a phase of the step; `phase_now` stays if memory runs out in it."""
        self._enter(phase)
        try:
            yield
        except torch.OutOfMemoryError:
            self._read(phase)
            raise
        self._read(phase)
        self._enter(Phase.OUTSIDE)

    def loss_made(self, loss: Tensor) -> None:
        """Label the autograd nodes of the loss."""
        if self._stamper is not None and self._is_compiled:
            self._stamper.label_outputs(loss)
        elif self._stamper is not None:
            self._stamper.label_loss(loss)

    def _enter(self, phase: Phase) -> None:
        self.phase_now = phase
        if self._stamper is not None:
            self._stamper.enter(step=self.step, phase=phase)
        self._device.allocator.reset_peaks()

    def _read(self, phase: Phase) -> None:
        allocator, figures = self._device.allocator, self.steps[-1]
        if phase is Phase.EVALUATION:
            figures.phases[phase] = allocator.peak_allocated_bytes
            figures.evaluation_reserved_bytes = allocator.peak_reserved_bytes
            return
        figures.peak_bytes = max(figures.peak_bytes, allocator.peak_allocated_bytes)
        figures.reserved_bytes = max(figures.reserved_bytes, allocator.peak_reserved_bytes)
        if phase in figures.phases:
            figures.phases[phase] = max(figures.phases[phase], allocator.peak_allocated_bytes)
            figures.after_phase[phase] = allocator.allocated_bytes
