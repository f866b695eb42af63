"""Training steps that one H200 ran, as tests/data/truth keeps them, and how far off their simulation is."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ligerprof.models import load_model, spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.outcome import StepOutcome
from tests.paths import TRUTH

# these stand for the kernels as they were when measured: measure anew when a kernel's memory changes
OWN_KERNELS_FILE = "h200-own-kernels.jsonl"
# what a later row of the same process found on the GPU moves its first step and its reserved bytes
_FRESH = "fresh"
_OPTIONS = ("loss", "precision", "checkpointing", "optimizer", "attention", "batch", "seq", "liger", "provider")
_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """A training step that one H200 ran.

    Attributes:
        options: TrainingRecipe's arguments.
        layers: decoder layers, where fewer than the model's.
        peak_bytes: None where memory ran out.
        phases: highest allocated bytes of each.
        fresh: whether the process had done nothing on the GPU before.
    """

    model: str
    options: Mapping[str, Any]
    layers: int | None
    peak_bytes: int | None
    reserved_bytes: int | None
    first_step_peak_bytes: int
    phases: Mapping[str, int]
    fresh: bool

    @property
    def name(self) -> str:
        defaults = {"loss": "hf", "attention": "sdpa", "liger": "none", "provider": "ligerprof"}
        words = [
            f"{key}={value}" if key not in _OPTIONS else str(value)
            for key, value in self.options.items()
            if key not in ("batch", "seq", "checkpointing") and defaults.get(key) != value
        ]
        shape = f"{self.options.get('batch', 4)}x{self.options.get('seq', 1024)}"
        kept = "checkpointed" if self.options.get("checkpointing", True) else "whole"
        layers = [f"{self.layers} layers"] if self.layers else []
        return " ".join([self.model, *layers, shape, kept, *words, *([_FRESH] if self.fresh else [])])

    def recipe(self) -> TrainingRecipe:
        """The recipe of this step."""
        # transformers 5.17 ran it for every model
        options = {"attention": "sdpa", **self.options}
        if self.model == "odd":
            return TrainingRecipe(model=str(TRUTH / "odd-llama"), **options)
        config = dict(_QWEN3) if self.model == "qwen3-0.6b" else load_model(self.model).config
        if self.layers:
            config["n_layer" if "n_layer" in config else "num_hidden_layers"] = self.layers
        return TrainingRecipe(model=spec_from_config(config, name=self.model), **options)


def measured_steps() -> list[MeasuredStep]:
    """Measured steps that no kernel of ours has a part in."""
    return [_from_first(row) for row in _rows("h200-steps.jsonl")] + wider_steps()


def wider_steps() -> list[MeasuredStep]:
    """Those of them over the whole recipe space, out of memory included."""
    return [_from_wider(row) for row in _rows("h200-wider-steps.jsonl")]


def steps_with_own_kernels() -> list[MeasuredStep]:
    """Measured steps with ligerprof's kernels."""
    return [_from_wider(row) for row in _rows(OWN_KERNELS_FILE)]


def _rows(name: str) -> Iterator[dict[str, Any]]:
    return map(json.loads, (TRUTH / name).read_text().splitlines())


def _from_first(row: dict[str, Any]) -> MeasuredStep:
    options = {name: row[name] for name in _OPTIONS}
    options["provider"] = row["provider"] or "ligerprof"
    return MeasuredStep(
        model=row["model"],
        options=options,
        layers=None,
        peak_bytes=row["peak_bytes"],
        reserved_bytes=row["reserved_bytes"],
        first_step_peak_bytes=row["first_step_peak_bytes"],
        phases=row["phases"],
        fresh=row["library_workspace_at_start_bytes"] == 0,
    )


def _from_wider(row: dict[str, Any]) -> MeasuredStep:
    return MeasuredStep(
        model=row["model"],
        options=row["options"],
        layers=row["layers"],
        peak_bytes=row.get("peak_bytes"),
        reserved_bytes=row.get("reserved_bytes"),
        first_step_peak_bytes=row["first_step_peak_bytes"],
        phases=row.get("phases", {}),
        fresh=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A measured step and its simulation."""

    step: MeasuredStep
    outcome: StepOutcome
    seconds: float

    @property
    def verdict_agrees(self) -> bool:
        """Whether both ran out of memory or neither did."""
        return (self.step.peak_bytes is None) == (self.outcome.oom is not None)

    @property
    def peak_error(self) -> float:
        return self.outcome.peak_bytes / (self.step.peak_bytes or 1) - 1

    @property
    def reserved_error(self) -> float:
        return self.outcome.reserved_bytes / (self.step.reserved_bytes or 1) - 1

    @property
    def first_step_error(self) -> float:
        return self.outcome.first_step_peak_bytes / self.step.first_step_peak_bytes - 1

    @property
    def worst_phase_error(self) -> float:
        simulated = {phase.value: size_bytes for phase, size_bytes in self.outcome.phases.items()}
        errors = [simulated[name] / measured - 1 for name, measured in self.step.phases.items() if simulated[name]]
        return max(errors, key=abs, default=0.0)


def score(step: MeasuredStep) -> Score:
    """Simulate one measured step."""
    from ligerprof.runs.simulated import simulate_step

    started = time.perf_counter()
    outcome = simulate_step(step.recipe(), record=False)
    return Score(step=step, outcome=outcome, seconds=time.perf_counter() - started)
