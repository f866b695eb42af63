"""Run one profiled step of a recipe, attribute its peak, and write the run directory."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from ligerprof.analyzers.estimate import Answer, MemoryEstimate, estimate, headroom_note, judge, require_host_memory
from ligerprof.analyzers.explain.analysis import SnapshotAnalysis, analyze
from ligerprof.analyzers.explain.failure import FailedAllocation
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.analyzers.explain.ranks import RankPeak, RanksReport
from ligerprof.errors import LigerprofError, MissingDependencyError, UnknownModelError, UnsupportedError
from ligerprof.kernels.registry import find_kernel_set, require_available
from ligerprof.recipe.categories import Device
from ligerprof.recipe.conflicts import require_packages, require_supported
from ligerprof.recipe.lengths import at_longest
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import find_limit, outside_bytes
from ligerprof.roles import STEP_PHASES, Backend, Phase, shown_phases
from ligerprof.runs.directory import RECIPE, RESULT, RunDirectory
from ligerprof.runs.outcome import Progress, StepOutcome
from ligerprof.serialization import document, select, to_json
from ligerprof.snapshots.reader import Snapshot

_STEADY_STEP = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """A step's outcome, its attributed peak, and the estimate (None if unsupported; a note gives the reason).

    Attributes:
        ranks: the attributed peaks of all ranks that were recorded; None unless there are several.
    """

    recipe: TrainingRecipe
    outcome: StepOutcome
    analysis: SnapshotAnalysis
    estimate: MemoryEstimate | None
    run: RunDirectory
    finished: datetime
    notes: tuple[str, ...]
    ranks: RanksReport | None = None

    @property
    def peak(self) -> PeakReport:
        return self.analysis.peak

    @property
    def failure(self) -> FailedAllocation | None:
        """The failed allocation if memory ran out and the recording contains it."""
        oom, failed = self.outcome.oom, self.analysis.out_of_memory
        return None if oom is None or failed is None else failed.under_limit(oom.limit_bytes)

    @property
    def limit_bytes(self) -> int | None:
        """The limit on reserved bytes that the step ran under; None if it was measured without one."""
        if self.outcome.oom is not None:
            return self.outcome.oom.limit_bytes
        if self.outcome.backend is Backend.SIMULATED:
            return find_limit(self.recipe).size_bytes
        return self.recipe.memory_limit_bytes

    @property
    def verdict(self) -> Answer | None:
        """Whether the step fits the limit; None without one."""
        completed = self.outcome.oom is None
        return None if self.limit_bytes is None else judge(self.limit_bytes, lambda _limit: completed)

    @property
    def fits(self) -> bool | None:
        return None if self.verdict is None else self.verdict.fits

    @property
    def reached_phases(self) -> tuple[Phase, ...]:
        """The phases of a steady step that ended, also if memory ran out later; only these compare with an estimate."""
        oom = self.outcome.oom
        if oom is None:
            return shown_phases(self.outcome.phases)
        # the first step lacks the optimizer states
        if oom.phase is Phase.EVALUATION:
            return STEP_PHASES
        if oom.step < _STEADY_STEP or oom.phase not in STEP_PHASES:
            return ()
        ended = STEP_PHASES[: STEP_PHASES.index(oom.phase)]
        # accumulated micro-batches repeat the passes
        return ended if self.recipe.grad_accum == 1 or oom.phase is Phase.OPTIMIZER else ()

    @property
    def step_seconds(self) -> float | None:
        """Median of the timed steps; None when simulated or out of memory."""
        return _median_seconds(self.outcome)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens trained per second on all GPUs together, accumulation included."""
        tokens = self.recipe.tokens * self.recipe.grad_accum * self.recipe.gpus
        return tokens / self.step_seconds if self.step_seconds else None

    @property
    def error_ratio(self) -> float | None:
        """The error of the estimate: estimate / peak - 1."""
        if self.estimate is None or self.outcome.oom is not None:
            return None
        return self.estimate.peak_bytes / self.outcome.peak_bytes - 1

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof step --json` and of result.json."""
        outcome = self.outcome
        return document(
            "step",
            select(self, "outcome.backend", "outcome.gpu", "outcome.peak_bytes", "peak.peak_phase"),
            select(outcome, "reserved_bytes", "first_step_peak_bytes", "first_step_reserved_bytes"),
            select(outcome, "second_step_peak_bytes", "second_step_reserved_bytes"),
            select(outcome, "evaluation_reserved_bytes"),
            select(self, "limit_bytes", "fits", "verdict"),
            {"phases": _per_phase(outcome.phases), "after_phase": _per_phase(outcome.after_phase)},
            select(self, "peak.roles", "step_seconds", "step_seconds_all=outcome.step_seconds", "tokens_per_second"),
            {
                "host_bytes": outcome.host_bytes,
                "outside": to_json(outcome.outside),
                "expected_outside_bytes": outside_bytes(self.recipe),
                "ranks": [self._rank_json(rank, of_rank) for rank, of_rank in outcome.ranks.items()],
            },
            {"oom": self._oom_json(), "reached_phases": to_json(self.reached_phases)},
            select(self, "peak.suggestions"),
            select(self, "estimate", "error_ratio", "run=run.path", "recipe", "outcome.versions"),
            {"finished": self.finished.isoformat(timespec="seconds"), "notes": list(self.notes)},
        )

    def _rank_json(self, rank: int, outcome: StepOutcome) -> dict[str, Any]:
        """An entry of `ranks`; the roles of a rank that was not recorded are null."""
        recorded = () if self.ranks is None else self.ranks.ranks
        roles = next((each.report.roles for each in recorded if each.rank == rank), None)
        return {
            "rank": rank,
            **select(outcome, "gpu", "peak_bytes", "reserved_bytes", "first_step_peak_bytes", "second_step_peak_bytes"),
            "phases": _per_phase(outcome.phases),
            "roles": to_json(roles),
            **select(outcome, "host_bytes", "outside"),
            "step_seconds": _median_seconds(outcome),
            "oom": to_json(outcome.oom),
        }

    def _oom_json(self) -> dict[str, Any] | None:
        """The failed allocation as in `explain`, with the limit, phase and step that the run knows."""
        if self.outcome.oom is None:
            return None
        recorded = {} if self.failure is None else self.failure.to_json()
        return {**recorded, **to_json(self.outcome.oom)}


def run_step(recipe: TrainingRecipe, run: RunDirectory, progress: Progress, *, trace: bool = True) -> StepReport:
    """Run the step on the recipe's device, attribute its peak and write the run directory.

    Args:
        run: an existing directory; removed if the step cannot run and wrote nothing.
        trace: whether to profile another measured step for TensorBoard.

    Raises:
        UnsupportedError: this version does not support an option of the recipe.
        KernelUnavailableError: a kernel of the recipe cannot run here.
        MissingDependencyError: no CUDA device, or a package is missing.
    """
    recipe = at_longest(recipe)
    try:
        outcome = _outcome(recipe, run, progress, trace=trace)
    except LigerprofError:
        run.remove_if_empty()
        raise
    progress("attributing the peak")
    report = _report(recipe, outcome, run)
    run.write_json(RECIPE, recipe.to_json())
    run.write_snapshot(outcome.snapshot)
    for rank, of_rank in outcome.ranks.items():
        if of_rank.snapshot is not outcome.snapshot:
            run.write_snapshot(of_rank.snapshot, rank=rank)
    run.write_json(RESULT, report.to_json())
    return report


def choose_backend(recipe: TrainingRecipe) -> Backend:
    """Whether the step is measured or simulated; `auto` measures if there is a CUDA device."""
    if recipe.device is Device.AUTO:
        import torch

        return Backend.MEASURED if torch.cuda.is_available() else Backend.SIMULATED
    return Backend.MEASURED if recipe.device is Device.CUDA else Backend.SIMULATED


def require_runnable(recipe: TrainingRecipe, *, command: str) -> None:
    """Raise if a step cannot run on this machine; call this before anything is written.

    Raises:
        UnsupportedError: this version does not support the options.
        MissingDependencyError: a package or a CUDA device is missing.
        KernelUnavailableError: a kernel cannot run here.
        DoesNotFitError: the estimate of main memory is over its limit.
    """
    require_host_memory(recipe)
    simulated = choose_backend(recipe) is Backend.SIMULATED
    require_supported(recipe, command=command, simulated=simulated)
    require_packages(recipe, command=command, simulated=simulated)
    for spec in find_kernel_set(recipe.providers, recipe.spec).values():
        require_available(spec, "simulated" if simulated else "cuda")
    if recipe.device is Device.CUDA:
        import torch

        if not torch.cuda.is_available():
            raise MissingDependencyError("no CUDA device. Use --device simulated.")


def _outcome(recipe: TrainingRecipe, run: RunDirectory, progress: Progress, *, trace: bool) -> StepOutcome:
    if choose_backend(recipe) is Backend.SIMULATED:
        from ligerprof.runs.simulated import simulate_step

        return simulate_step(recipe, progress=progress)
    trace_directory = run.tensorboard if trace else None
    from ligerprof.runs.measured.ranks import measure_with_engine

    return measure_with_engine(recipe, trace_directory=trace_directory, logs=run.path, progress=progress)


def _report(recipe: TrainingRecipe, outcome: StepOutcome, run: RunDirectory) -> StepReport:
    analysis = analyze(Snapshot.from_dict(outcome.snapshot), step=outcome.profiled_step, recipe=recipe)
    peak, outcome = analysis.peak, _with_recorded_failure(outcome, analysis.out_of_memory)
    notes = [*outcome.notes, *peak.notes]
    if outcome.oom is None and peak.peak_bytes != outcome.peak_bytes:
        difference_bytes = peak.peak_bytes - outcome.peak_bytes
        notes.append(f"the roles add up to the snapshot's peak, {difference_bytes:+d} bytes off the counters' peak")
    if (headroom := headroom_note(recipe)) is not None:
        notes.append(headroom)
    estimated = None
    try:
        estimated = estimate(recipe)
    except (UnknownModelError, UnsupportedError) as error:
        notes.append(f"no estimate: {error}")
    return StepReport(
        recipe=recipe,
        outcome=outcome,
        analysis=analysis,
        estimate=estimated,
        run=run,
        finished=datetime.now(timezone.utc),
        notes=tuple(notes),
        ranks=_ranks_report(outcome, analysis, run),
    )


def _ranks_report(outcome: StepOutcome, worst: SnapshotAnalysis, run: RunDirectory) -> RanksReport | None:
    found = []
    for rank, of_rank in outcome.ranks.items():
        if of_rank.snapshot is outcome.snapshot:
            found.append(RankPeak(rank=rank, source=run.snapshot, report=worst.peak))
        elif of_rank.snapshot.get("device_traces"):
            analysis = analyze(Snapshot.from_dict(of_rank.snapshot), step=of_rank.profiled_step)
            found.append(RankPeak(rank=rank, source=run.rank_snapshot(rank), report=analysis.peak))
    return RanksReport(ranks=tuple(found)) if len(found) > 1 else None


def _with_recorded_failure(outcome: StepOutcome, failed: FailedAllocation | None) -> StepOutcome:
    """Take the figures of an out-of-memory error from its event, if the recording contains it."""
    if outcome.oom is None or failed is None:
        return outcome
    figures = select(failed, "requested_bytes", "allocated_bytes", "reserved_bytes")
    return replace(outcome, oom=replace(outcome.oom, **figures))


def _per_phase(sizes: Mapping[Phase, int]) -> dict[str, int]:
    """Bytes of each phase of a step, 0 for one that did not run, and of an evaluation if there was one."""
    return {phase.value: sizes.get(phase, 0) for phase in shown_phases(sizes)}


def _median_seconds(outcome: StepOutcome) -> float | None:
    return statistics.median(outcome.step_seconds) if outcome.step_seconds else None
