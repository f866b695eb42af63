"""Simulate every measured step of tests/data/truth and print how far off the simulation is.

Run from the repository root: python -m benchmarks.simulate_truth [--only WORD]
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligerprof.models import load_model, spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.outcome import StepOutcome

TRUTH_DIR = Path(__file__).resolve().parent.parent / "tests" / "data" / "truth"
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
        if self.model == "odd":
            return TrainingRecipe(model=str(TRUTH_DIR / "odd-llama"), **self.options)
        config = dict(_QWEN3) if self.model == "qwen3-0.6b" else load_model(self.model).config
        if self.layers:
            config["n_layer" if "n_layer" in config else "num_hidden_layers"] = self.layers
        return TrainingRecipe(model=spec_from_config(config, name=self.model), **self.options)


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
    return map(json.loads, (TRUTH_DIR / name).read_text().splitlines())


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


def table(scores: Iterable[Score]) -> Iterator[str]:
    """Rows of a Markdown table."""
    yield "| step | measured peak, MiB | simulated | error | worst phase | first step | reserved | seconds |"
    yield "|---|---|---|---|---|---|---|---|"
    for item in scores:
        if item.step.peak_bytes is None or item.outcome.oom is not None:
            verdict = "out of memory on both" if item.verdict_agrees else "VERDICTS DIFFER"
            yield f"| {item.step.name} | {verdict} | | | | {item.first_step_error:+.4%} | | {item.seconds:.1f} |"
            continue
        yield (
            f"| {item.step.name} | {item.step.peak_bytes / 2**20:,.1f} | {item.outcome.peak_bytes / 2**20:,.1f}"
            f" | {item.peak_error:+.4%} | {item.worst_phase_error:+.4%} | {item.first_step_error:+.4%}"
            f" | {item.reserved_error:+.2%} | {item.seconds:.1f} |"
        )


def summary(scores: Iterable[Score]) -> str:
    """The median and the worst error, in a sentence."""
    fitting = [item for item in scores if item.step.peak_bytes is not None and item.outcome.oom is None]
    peaks = [abs(item.peak_error) for item in fitting]
    reserved = [abs(item.reserved_error) for item in fitting]
    return (
        f"{len(fitting)} steps. Peak: median {statistics.median(peaks):.4%}, worst {max(peaks):.4%}."
        f" Reserved: median {statistics.median(reserved):.2%}, worst {max(reserved):.2%}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="score steps whose name holds this word")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")
    scores = []
    for step in [*measured_steps(), *steps_with_own_kernels()]:
        if only in step.name:
            try:
                scores.append(score(step))
            # a model that the installed transformers runs otherwise is a row less, not the end
            except Exception as error:
                print(f"<!-- {step.name}: {error} -->")
    print("\n".join(table(scores)))
    print(f"\n{summary(scores)}")


if __name__ == "__main__":
    main()
