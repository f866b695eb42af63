"""What the commands compute, as functions: recipes, files and results in; the objects that the commands print out.

The functions raise `LigerprofError` for everything that a caller can fix, including arguments of a wrong type.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ligerprof.analyzers import estimate as analytic
from ligerprof.analyzers.compare import Comparison, Figures, figures_from_json, figures_of_ranks
from ligerprof.analyzers.compare import compare as compare_figures
from ligerprof.analyzers.estimate import MemoryEstimate, Moment
from ligerprof.analyzers.search.budget import Judge, Reserved
from ligerprof.analyzers.search.fastest import Plan
from ligerprof.errors import MissingDependencyError, ResultFormatError, UnsupportedError, WrongTypeError
from ligerprof.files import STANDARD_INPUT, FileKind, read_json, starts_as_json
from ligerprof.models import ModelSpec, spec_from_config
from ligerprof.recipe.conflicts import require_supported
from ligerprof.recipe.lengths import require_simulated_run
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import find_limit
from ligerprof.runs.directory import find_trace, read_result
from ligerprof.runs.simulators import Simulators, reserved
from ligerprof.runs.tapes.traced import with_tape
from ligerprof.text import short_repr

if TYPE_CHECKING:
    from ligerprof.analyzers.attribution.rules import UserRule
    from ligerprof.analyzers.explain.analysis import SnapshotAnalysis
    from ligerprof.analyzers.explain.peak import PeakDiff, PeakReport
    from ligerprof.analyzers.search.changes import Advice, Change, Settle, Sharding
    from ligerprof.analyzers.search.fastest import Candidate, Fastest
    from ligerprof.analyzers.search.fit import Answered, Fit
    from ligerprof.analyzers.trace.analysis import TraceReport
    from ligerprof.runs.outcome import StepOutcome
    from ligerprof.snapshots.reader import Snapshot

    Source = str | os.PathLike[str] | PeakReport | MemoryEstimate | StepOutcome

PathLike = str | os.PathLike[str]
Progress = Callable[[str], None]
_Kind = TypeVar("_Kind")

_FIGURES = FileKind(error=ResultFormatError, hint="Use the output of step, estimate or explain.")
_PEAK = FileKind(error=ResultFormatError, hint="Use a snapshot, or the output of `ligerprof explain --json`.")


def estimate(
    recipe: "TrainingRecipe | Any", *, loss: "Callable[[Any, Any], Any] | None" = None, **options: Any
) -> MemoryEstimate:
    """Predict the memory of one training step; see `ligerprof estimate`.

    A recipe of a model with a row needs no torch. Other models are traced with it, unless the cache has their tape.

    Args:
        recipe: what to train and how; or a model of transformers, or an `nn.Module` that takes token indices, in the
            dtype of its weights.
        loss: of the module's output and the labels, if its `forward` takes no labels; else that returns the loss: by
            itself, first in a tuple, or as `loss` in a dict or an object.
        options: options of the recipe, such as `batch`, `seq`, `optimizer` and `gpu`.
    """
    if isinstance(recipe, TrainingRecipe):
        return analytic.estimate(with_tape(replace(recipe, **options), _silent))
    if loss is None and hasattr(getattr(recipe, "config", None), "to_dict"):
        return analytic.estimate(with_tape(_recipe_of_model(recipe, options), _silent))
    return _estimate_of_module(recipe, loss, options)


def _estimate_of_module(
    model: Any, loss: "Callable[[Any, Any], Any] | None", options: Mapping[str, Any]
) -> MemoryEstimate:
    if not hasattr(model, "forward") or not hasattr(model, "parameters"):
        raise WrongTypeError(f"{short_repr(model)} is neither a recipe nor a module of torch.")
    from ligerprof.runs.tapes.own import packed, require_covered, require_loss, spec_of

    require_loss(model, loss)
    own = packed(model, loss)
    recipe = _recipe_with(model, spec_of(model, loss, own), {"checkpointing": False, **options})
    require_covered(recipe)
    return analytic.estimate(with_tape(recipe, _silent, own))


def simulate(recipe: TrainingRecipe, *, record: bool = True, progress: Progress | None = None) -> "StepOutcome":
    """Run one profiled step without a GPU; see `ligerprof step --device simulated`.

    `record`: whether to record events for the outcome's snapshot; `progress` receives short messages.
    """
    from ligerprof.runs.simulated import simulate_step

    return simulate_step(_recipe(recipe), record=record, progress=progress)


def explain(
    source: "PathLike | Snapshot | None" = None,
    *,
    device_index: int | None = None,
    step: int | None = None,
    rules: "Sequence[UserRule]" = (),
    stacks: bool = False,
) -> "PeakReport":
    """Report what the memory at the peak of a snapshot or a run belongs to; see `ligerprof explain`.

    Without a source, it reports on this process: on what it holds, and on the peak since
    torch.cuda.memory._record_memory_history() was called.
    """
    from ligerprof.analyzers.explain.analysis import analyze
    from ligerprof.snapshots.reader import Snapshot

    if source is None:
        source = _snapshot_of_process()
    snapshot = source if isinstance(source, Snapshot) else _path(source)
    return analyze(snapshot, device_index=device_index, step=step, rules=rules, stacks=stacks).peak


def fit(  # noqa: PLR0913 - callbacks and changes
    recipe: TrainingRecipe,
    *,
    simulate: bool = True,
    progress: Progress | None = None,
    remaining: Callable[[int], None] | None = None,
    processes: int = 0,
    ladder: "Sequence[Change] | None" = None,
    nearest: "Sequence[Change] | None" = None,
    answered: "Answered | None" = None,
) -> "Fit":
    """Find the largest batch and sequence within the memory limit, or the GPU's memory; see `ligerprof fit`.

    Args:
        recipe: what to train, how, and on which GPU.
        simulate: whether to check answers by simulated steps.
        progress: receives short messages.
        remaining: receives the number of simulations that are probably left, whenever it changes.
        processes: how many new processes simulate recipes at the same time; 0 simulates in this process.
        ladder: the changes that may make the wanted batch and sequence fit; None: those of `advise` that keep both.
        nearest: the changes that are tried one by one if no batch fits; None: bf16 weights, 8-bit Adam, offload.
        answered: receives the name (`wanted`, `batch`, `seq`) and the value of each answer when it is known.
    """
    from ligerprof.analyzers.search import fit as search
    from ligerprof.analyzers.search.changes import NEAREST, SAME_DATA

    say = progress or _silent
    with closing(Simulators(processes)) as simulators:
        judge = make_judge(recipe, simulate=simulate, progress=say, simulators=simulators)
        changes = {"ladder": ladder or SAME_DATA, "nearest": NEAREST if nearest is None else nearest}
        return search.fit(recipe, judge, say, remaining, **changes, answered=answered)


def fastest(
    recipe: TrainingRecipe,
    *,
    simulate: bool = True,
    progress: Progress | None = None,
    better: "Callable[[Candidate], None] | None" = None,
    processes: int = 0,
) -> "Fastest":
    """Find the fastest recipes for the same training that fit the memory limit; see `ligerprof fit --fastest`.

    Args:
        recipe, simulate, progress, processes: as for `fit`.
        better: receives each recipe that fits and is faster than those before.
    """
    from ligerprof.analyzers.search import fastest as search

    say = progress or _silent
    with closing(Simulators(processes)) as simulators:
        judge = make_judge(recipe, simulate=simulate, progress=say, simulators=simulators)
        return search.fastest(recipe, judge, say, better or (lambda _candidate: None))


def advise(
    recipe: TrainingRecipe,
    *,
    simulate: bool = True,
    progress: Progress | None = None,
    tried: Callable[[int, int], None] | None = None,
    sharding: "Sharding | None" = None,
    settle: "Settle | None" = None,
) -> "Advice":
    """Find the cheapest changes that make a recipe fit; see `ligerprof advise`.

    Args:
        recipe, simulate, progress: as for `fit`.
        tried: receives the number of the change that is tried next, and the most that will be tried.
        sharding: how several GPUs share the states; None: DeepSpeed's stages first, then FSDP2.
        settle: what a changed recipe becomes in the user's own files, or why these cannot say it; None without files.
    """
    from ligerprof.analyzers.search import changes as search
    from ligerprof.analyzers.search.changes import Sharding, make_ladder, settled

    # the ladder judges main memory itself, change by change
    host_limit_bytes, recipe = recipe.host_memory_bytes, replace(recipe, host_memory_bytes=None)
    judge = make_judge(recipe, simulate=simulate, progress=progress or _silent)
    ladder = make_ladder(sharding or Sharding())
    if settle is not None:
        ladder = settled(ladder, settle)
    return search.advise(recipe, judge, tried, host_limit_bytes=host_limit_bytes, ladder=ladder)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan(Plan):
    """A plan that can be applied to a model."""

    def apply(self, model: Any) -> AbstractContextManager[Any]:
        """Let a model of transformers recompute and keep what the plan says.

        Returns:
            A context for the forward and backward pass of each micro-batch: it moves activations to main memory if the
            plan does, and else does nothing.
        """
        checkpoint(model, self.selection)
        if not self.recipe.activation_offload:
            return nullcontext()
        from ligerprof.runs.activation_offload import ActivationOffload

        return ActivationOffload(model)


def checkpoint(model: Any, layers: str) -> None:
    """Let a model of transformers recompute and keep what each layer is to, by torch.utils.checkpoint.

    Args:
        model: its decoder layers are transformers' GradientCheckpointingLayers.
        layers: runs of layers with what they keep, as `ligerprof fit --plan` prints them and `--selective` takes them.
    """
    from ligerprof.runs.activation_offload import checkpointed_layers, enable_checkpointing

    recipe = _recipe_of_model(model, {"selective": layers})
    if (found := len(checkpointed_layers(model))) != recipe.spec.layers:
        raise UnsupportedError(
            f"checkpoint: the model has {found} layers that transformers can checkpoint, and its config"
            f" {recipe.spec.layers}. Only models with decoder layers alone are supported."
        )
    enable_checkpointing(model, recipe)


def plan(
    model: "TrainingRecipe | Any",
    limit_bytes: int | None = None,
    *,
    simulate: bool = True,
    progress: Progress | None = None,
    processes: int = 0,
    **options: Any,
) -> ModelPlan:
    """Plan what each layer recomputes and keeps, so that steps within a limit are fastest; see `ligerprof fit --plan`.

    Args:
        model: a recipe, or a model of transformers, whose config and dtype the recipe takes.
        limit_bytes: on what torch's allocator reserves; None: the recipe's, or what its GPU leaves.
        simulate, progress, processes: as for `fit`.
        options: further options of the recipe, such as `batch`, `seq`, `optimizer` and `gpu`.
    """
    from ligerprof.analyzers.search import fastest as search

    recipe = replace(model, **options) if isinstance(model, TrainingRecipe) else _recipe_of_model(model, options)
    if limit_bytes is not None:
        recipe = replace(recipe, memory_limit_bytes=limit_bytes)
    say = progress or _silent
    with closing(Simulators(processes)) as simulators:
        judge = make_judge(recipe, simulate=simulate, progress=say, simulators=simulators)
        found = search.plan(recipe, judge, say)
    return ModelPlan(**{each.name: getattr(found, each.name) for each in fields(found)})


def _recipe_of_model(model: Any, options: Mapping[str, Any]) -> TrainingRecipe:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(model, "parameters"):
        raise WrongTypeError(f"{short_repr(model)} is neither a recipe nor a model of transformers.")
    return _recipe_with(
        model, spec_from_config(config.to_dict(), name=str(config._name_or_path or config.model_type)), options
    )


def _recipe_with(model: Any, spec: ModelSpec, options: Mapping[str, Any]) -> TrainingRecipe:
    """A recipe in the dtype of a model's weights."""
    whole = any(str(parameter.dtype) == "torch.float32" for parameter in model.parameters())
    return TrainingRecipe(**{"model": spec, "precision": "amp" if whole else "bf16", **options})


def compare(*sources: "Source", reference: int = 0) -> Comparison:
    """Compare estimates, runs and snapshots role by role; see `ligerprof compare`.

    Args:
        sources: run directories, files that `ligerprof compare` reads, or results of this library. A single run is
            compared with the estimate or the simulation that it contains.
        reference: index of the source that the others are compared with.
    """
    found = [_figures(source) for source in sources]
    columns = found[0] if len(found) == 1 else tuple(figures[0] for figures in found)
    return compare_figures(columns, reference=reference)


def diff(before: "PathLike | PeakReport", after: "PathLike | PeakReport") -> "PeakDiff":
    """Show what grew and shrank between two peaks; see `ligerprof diff`."""
    from ligerprof.analyzers.explain.peak import PeakReport, diff_peaks

    pair = [side if isinstance(side, PeakReport) else peak_of(read_peak(side)) for side in (before, after)]
    return diff_peaks(*pair)


def analyze_trace(source: PathLike) -> "TraceReport":
    """Report how busy the GPU was in a profiled step; see `ligerprof trace`."""
    from ligerprof.analyzers.trace.analysis import analyze
    from ligerprof.analyzers.trace.events import read_trace

    path = _path(source)
    return analyze(read_trace(find_trace(path) if path.is_dir() else path))


def make_judge(
    recipe: TrainingRecipe, *, simulate: bool, progress: Progress, simulators: Simulators | None = None
) -> Judge:
    """The judge of a recipe's limit; raises RecipeError if the GPU has less, UnsupportedError for a compiled step."""
    if _recipe(recipe).compile:
        raise UnsupportedError(
            "--compile: what fits under torch.compile is known after it has compiled. Simulate a step with `ligerprof"
            " step --device simulated`, or search with --no-compile."
        )

    def simulated(candidate: TrainingRecipe) -> Reserved:
        # before the message and the import of torch
        require_supported(candidate, command="simulate", simulated=True)
        if candidate.lengths is not None:
            require_simulated_run(candidate)
        progress(f"simulating {candidate.summary}{f', {candidate.alloc_conf}' if candidate.alloc_conf else ''}")
        if candidate.lengths is not None:
            return _simulated_run(candidate, progress)
        elsewhere = None if simulators is None else simulators.simulate(candidate)
        if elsewhere is not None:
            return elsewhere
        from ligerprof.runs.simulated import simulate_step

        return reserved(simulate_step(candidate, record=False))

    expect = simulators.expect if simulators is not None and simulators.count else None
    return Judge(find_limit(_recipe(recipe)), simulated, expect) if simulate else Judge(find_limit(_recipe(recipe)))


def _simulated_run(recipe: TrainingRecipe, progress: Progress) -> Reserved:
    """Every step of a pass over the file of lengths; an evaluation follows a step on full sequences."""
    from ligerprof.runs.simulated import simulate_step
    from ligerprof.runs.whole_run.simulate import simulate_run

    evaluation_bytes = 0
    if recipe.eval_batch is not None:
        progress("simulating an evaluation")
        evaluated = reserved(simulate_step(replace(recipe, batch=1, lengths=None), record=False))
        # a whole run takes longer
        if not evaluated.fits:
            return evaluated
        evaluation_bytes = evaluated.evaluation_bytes
    run = simulate_run(recipe, progress)
    step = run.reserved.step if run.oom is None else run.oom.moment.step
    return Reserved(
        first_bytes=0,
        steady_bytes=run.reserved_bytes,
        evaluation_bytes=evaluation_bytes,
        fits=run.oom is None,
        failed_in=None if run.oom is None else str(Moment.FIRST if step == 1 else Moment.STEADY),
        run_step=step,
    )


def read_figures(source: PathLike, *, of_ranks: bool = False) -> tuple[Figures, ...]:
    """The figures of a run directory, of the JSON of a command, or of a snapshot; `of_ranks`: of the ranks of a run."""
    path = _path(source)
    read = figures_of_ranks if of_ranks else figures_from_json
    if path.is_dir():
        result = read_result(path)
        # a run of a command has its figures in the recording
        if of_ranks or result.get("kind") != "run":
            return read(result, str(path))
    elif of_ranks or path.suffix == ".json" or path == STANDARD_INPUT or starts_as_json(path, _FIGURES):
        return read(read_json(path, _FIGURES), str(path))
    from ligerprof.analyzers.explain.peak import figures_from_peak

    return (figures_from_peak(explain(path), str(path)),)


def read_peak(source: PathLike, *, device_index: int | None = None) -> "SnapshotAnalysis | PeakReport":
    """The analysis of a snapshot or run, or the report in the JSON of `ligerprof explain`."""
    from ligerprof.analyzers.explain.analysis import analyze
    from ligerprof.analyzers.explain.peak import report_from_json

    path = _path(source)
    # a directory is a run, and standard input a snapshot
    if path.is_file() and starts_as_json(path, _PEAK):
        return report_from_json(read_json(path, _PEAK), str(path))
    return analyze(path, device_index=device_index)


def peak_of(read: "SnapshotAnalysis | PeakReport") -> "PeakReport":
    """The report of what `read_peak` returns."""
    from ligerprof.analyzers.explain.peak import PeakReport

    return read if isinstance(read, PeakReport) else read.peak


def _figures(source: "Source") -> tuple[Figures, ...]:
    if isinstance(source, MemoryEstimate):
        return figures_from_json(source.to_json(), "estimate")
    if isinstance(source, (str, os.PathLike)):
        return read_figures(source)
    from ligerprof.analyzers.explain.peak import PeakReport, figures_from_peak
    from ligerprof.runs.outcome import StepOutcome

    if isinstance(source, StepOutcome):
        report = _analyze_outcome(source)
        return (replace(figures_from_peak(report, "step"), backend=source.backend),)
    return (figures_from_peak(_typed(source, PeakReport, "something to compare", "a path or a result"), "snapshot"),)


def _snapshot_of_process() -> "Snapshot":
    from ligerprof.snapshots.reader import Snapshot

    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        raise MissingDependencyError("this process uses no GPU. Name a snapshot, or call explain() where tensors are.")
    return Snapshot.from_dict(torch.cuda.memory._snapshot(), source="this process")


def _analyze_outcome(outcome: "StepOutcome") -> "PeakReport":
    from ligerprof.snapshots.reader import Snapshot

    snapshot = Snapshot.from_dict(outcome.snapshot, source="the step")
    return explain(snapshot, step=None if outcome.oom is not None else outcome.profiled_step)


def _recipe(recipe: TrainingRecipe) -> TrainingRecipe:
    return _typed(recipe, TrainingRecipe, "a recipe", "TrainingRecipe(model=…)")


def _path(source: PathLike) -> Path:
    return Path(_typed(source, (str, os.PathLike), "a file", "a path"))


def _typed(value: _Kind, kinds: Any, what: str, wanted: str) -> _Kind:
    if not isinstance(value, kinds):
        raise WrongTypeError(f"{short_repr(value)} is not {what}. Pass {wanted}.")
    return value


def _silent(_: str) -> None:
    """Keep no message."""
