"""The result of an estimate: peak, phases, roles, headline terms, assumptions and omissions."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ligerprof.analyzers.estimate.compared import Comparison
from ligerprof.analyzers.estimate.judge import Answer
from ligerprof.analyzers.estimate.places import PlaceBytes
from ligerprof.analyzers.estimate.replayed import EstimatedRun
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import MemoryBreakdown, Phase
from ligerprof.serialization import JsonKeys, document, select
from ligerprof.words import ExplainedWord


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One headline quantity as a formula and its value.

    Attributes:
        name: such as `checkpoints`.
        formula: such as `B T H L 4`.
    """

    name: str
    formula: str
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """An entry of `terms` in the estimate's JSON."""
        return select(self, "name", "formula", "bytes=size_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingRange:
    """The steady step's peak as tokens choose experts in one way or another.

    Attributes:
        implementation: how transformers runs the experts, in its words; None if the model allows only one way.
        depends: whether sizes depend on the routing.
        uniform_bytes: the peak if every expert receives as many tokens.
        worst_bytes: the peak if all tokens choose the same experts.
    """

    implementation: str | None
    depends: bool
    uniform_bytes: int
    worst_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The estimate's `routing`."""
        return select(self, "implementation", "depends", "uniform_bytes", "worst_bytes")


_VERDICT_KEYS = ("limit_bytes", "limit_source", "decided_by", "allocated_fits")


class Moment(ExplainedWord):
    """The part of a run that needs most memory; only the highest decides whether a run fits."""

    STEADY = "steady step", "the second step and later ones"
    FIRST = "first step", "the first step, which creates optimizer states"
    SECOND = "second step", "DDP's second step, which builds its buckets anew"
    EVALUATION = "evaluation", "an evaluation between steps"
    SAVING = "saving", "gathering the model to save it whole"


@dataclass(frozen=True, kw_only=True, slots=True)
class FitVerdict:
    """Whether a step fits a limit on reserved bytes.

    Attributes:
        limit_bytes: the limit.
        limit_source: its origin, such as `--memory-limit`.
        decided_by: the moment with the highest peak.
        allocated_bytes: the highest peak of all steps, an evaluation and saving; over the limit, a run fails.
        answer: the judge's.
    """

    limit_bytes: int
    limit_source: str
    decided_by: Moment
    allocated_bytes: int
    answer: Answer

    def to_json(self) -> dict[str, Any]:
        """The keys of the estimate's JSON about the limit; null without one."""
        return select(self, *_VERDICT_KEYS)

    @property
    def allocated_fits(self) -> bool:
        """Whether the allocated bytes are within the limit."""
        return self.allocated_bytes <= self.limit_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class HostVerdict:
    """Whether what training keeps in main memory fits the limit on it.

    Attributes:
        limit_bytes: the limit, for all GPUs together.
        needed_bytes: main memory that the processes of all GPUs use.
    """

    limit_bytes: int
    needed_bytes: int

    @property
    def fits(self) -> bool:
        """Whether it is within the limit."""
        return self.needed_bytes <= self.limit_bytes


# Python, libraries with their kernels and the CUDA context: the median of 73 processes on H200s (docs/deepspeed.md)
PROCESS_BYTES = 1_690_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class MainMemory:
    """What a rank's process needs in main memory at its highest moments, besides `PROCESS_BYTES`.

    Attributes:
        loading_bytes: while transformers reads a checkpoint of 16-bit weights: tensors in another dtype.
        loading_ranks: how many ranks read it; the others have no weights meanwhile.
        file_bytes: pages of the checkpoint's files that are mapped meanwhile. All ranks share them, and the operating
            system takes them back if memory is short.
        training_bytes: what is offloaded.
        saving_bytes: of rank 0 while it saves the model, `training_bytes` included.
    """

    loading_bytes: int
    loading_ranks: int
    file_bytes: int
    training_bytes: int
    saving_bytes: int

    def of_machine(self, gpus: int) -> tuple[str, int]:
        """What the processes of all GPUs do when they need most, and what they need then, without pages of files."""
        moments = {
            "training": gpus * self.training_bytes,
            "loading a checkpoint": self.loading_ranks * self.loading_bytes,
            "saving the model": (gpus - 1) * self.training_bytes + self.saving_bytes,
        }
        moment = max(moments, key=lambda each: moments[each])
        return moment, gpus * PROCESS_BYTES + moments[moment]

    def to_json(self) -> dict[str, int]:
        """The object `main_memory` of the JSON."""
        return {"process_bytes": PROCESS_BYTES, **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate(JsonKeys):
    """The estimated memory of a training step on one GPU.

    Attributes:
        peak_bytes: max_memory_allocated of the steady step, from an empty device.
        peak_phase: the phase of the peak.
        phases: peaks of forward, backward and optimizer, and of an evaluation.
        static_bytes: weights, gradients and optimizer states.
        checkpoint_bytes: the inputs of all decoder layers, 0 without checkpointing.
        logits_bytes: the highest sum of all [T, V] logits tensors, 0 if the loss makes none.
        roles: the peak by role; adds up to `peak_bytes`.
        layers: the peak by part of the model, in forward order.
        first_step_peak_bytes: the peak of the first step, which begins without optimizer states.
        second_step_peak_bytes: the peak of DDP's second step, which builds its buckets anew; None for other engines.
        evaluation_roles: the peak of an evaluation by role; None without one.
        saving_peak_bytes: the peak while the model is gathered to save it whole; None if nothing is gathered.
        host_bytes: main memory that offloaded training uses in this GPU's process, else 0.
        main_memory: what its process needs in main memory while it loads, trains and saves.
        terms: the headline terms.
        assumed: assumptions behind the figures, one sentence each.
        left_out: memory that the figures do not include, one sentence each.
        routing: the range of peaks over the routing of a mixture of experts; None without experts.
        compared: measured steps under the same engine, and how far the estimate is from them; None without any.
        gpu: whether the run fits the limit on the GPU; None without one.
        host: whether it fits main memory; None without a limit on that.
        recipe: what is trained, and how.
        run: the events that the estimate counts.
    """

    recipe: TrainingRecipe
    peak_bytes: int
    peak_phase: Phase
    phases: Mapping[Phase, int]
    static_bytes: int
    checkpoint_bytes: int
    logits_bytes: int
    roles: MemoryBreakdown
    layers: tuple[PlaceBytes, ...]
    first_step_peak_bytes: int
    second_step_peak_bytes: int | None
    evaluation_roles: MemoryBreakdown | None
    saving_peak_bytes: int | None
    host_bytes: int
    main_memory: MainMemory
    terms: tuple[Term, ...]
    assumed: tuple[str, ...]
    left_out: tuple[str, ...]
    routing: RoutingRange | None = None
    compared: Comparison | None = None
    gpu: FitVerdict | None = None
    host: HostVerdict | None = None
    run: EstimatedRun = field(repr=False, compare=False)

    @property
    def verdict(self) -> Answer | None:
        """Whether the run fits the GPU and main memory, as far as they have limits; None without any."""
        if self.host is not None and not self.host.fits:
            return Answer.DOES_NOT_FIT
        if self.gpu is not None:
            return self.gpu.answer
        return None if self.host is None else Answer.FITS

    @property
    def fits(self) -> bool | None:
        """The verdict in JSON: None also where it may not fit."""
        return None if self.verdict is None else self.verdict.fits

    @property
    def reserved_bytes(self) -> int:
        """The most that torch's allocator reserves in the run without a limit: its events, replayed."""
        return self.run.reserved_bytes

    @property
    def lowest_bytes(self) -> int:
        """`peak_bytes`: a replay knows each block, so that the peak has no bounds."""
        return self.peak_bytes

    highest_bytes = lowest_bytes

    @property
    def evaluation_peak_bytes(self) -> int | None:
        """The peak of an evaluation; None without one."""
        return None if self.evaluation_roles is None else self.evaluation_roles.total_bytes

    @property
    def highest(self) -> tuple[Moment, int]:
        """The moment of the whole run that allocates most, and its bytes."""
        moments = {
            Moment.STEADY: self.peak_bytes,
            Moment.FIRST: self.first_step_peak_bytes,
            Moment.SECOND: self.second_step_peak_bytes or 0,
            Moment.EVALUATION: self.evaluation_peak_bytes or 0,
            Moment.SAVING: self.saving_peak_bytes or 0,
        }
        moment = max(moments, key=lambda each: moments[each])
        return moment, moments[moment]

    @property
    def highest_peak_bytes(self) -> int:
        """The highest peak of all steps, of an evaluation and of saving, which decides whether a recipe fits."""
        return self.highest[1]

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof estimate --json`."""
        return document(
            "estimate",
            select(self, "peak_bytes", "peak_phase", "phases", "static_bytes", "checkpoint_bytes", "logits_bytes"),
            select(self, "roles", "layers", "lowest_bytes", "highest_bytes"),
            select(self, "first_step_peak_bytes", "second_step_peak_bytes"),
            select(self, "evaluation_peak_bytes", "evaluation_roles", "saving_peak_bytes", "host_bytes"),
            select(self, "reserved_bytes", "main_memory"),
            dict.fromkeys(_VERDICT_KEYS) if self.gpu is None else self.gpu.to_json(),
            select(self, "fits", "verdict"),
            {"host_limit_bytes": None if self.host is None else self.host.limit_bytes},
            select(self, "routing", "terms", "assumed", "left_out", "compared", "recipe"),
        )
