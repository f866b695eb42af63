"""Compare the estimate from a tape and from forms with the simulated step, for architectures with a row.

One line per architecture and settings: the simulated peak, and how far each estimate is from it, in percent. The tape
is traced at 2 x 256 tokens and replayed at 3 x 384.

Run from the repository root: python -m benchmarks.tapes_and_forms [--family NAME] [--setting NAME]
"""

import argparse
import dataclasses
from collections.abc import Iterator
from random import Random
from typing import Any

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import LigerprofError
from ligerprof.models.architectures import ARCHITECTURES
from ligerprof.recipe.categories import Attention
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.simulated import simulate_step
from ligerprof.runs.tapes.recipes import to_trace, with_tape_of
from ligerprof.runs.tapes.traced import trace_tape
from tests.drawn_recipes import draw_spec

SETTINGS: dict[str, dict[str, Any]] = {
    "amp": {},
    "bf16": {"precision": "bf16"},
    "fp32": {"precision": "fp32"},
    "eager": {"attention": "eager", "precision": "bf16"},
    "LoRA": {"lora": 8, "precision": "bf16"},
    "kernels": {"liger": "all", "precision": "bf16"},
}


def recipes(families: list[str], settings: list[str]) -> Iterator[tuple[str, str, TrainingRecipe | str]]:
    """A recipe of each architecture and settings, or why there is none."""
    for family in families:
        model = draw_spec(Random(family), family)
        for name in settings:
            for checkpointing in (True, False):
                title = f"{name}{', checkpointed' if checkpointing else ''}"
                options = {"batch": 3, "seq": 384, "checkpointing": checkpointing, **SETTINGS[name]}
                try:
                    yield family, title, TrainingRecipe(model=model, **options)
                except LigerprofError as error:
                    yield family, title, str(error)


def differences(recipe: TrainingRecipe) -> str:
    """The simulated peak and the differences of both estimates from it."""
    simulated_bytes = simulate_step(recipe, record=False).peak_bytes
    found = []
    for estimated in (_from_tape, estimate):
        try:
            result = estimated(recipe)
        except LigerprofError as error:
            found.append(f"refused ({str(error)[:60]})")
            continue
        found.append(f"{100 * (result.peak_bytes / simulated_bytes - 1):+.4f} %")
    return f"{simulated_bytes:>14,}  tape {found[0]}  forms {found[1]}"


def _from_tape(recipe: TrainingRecipe) -> Any:
    tape = trace_tape(dataclasses.replace(to_trace(recipe), batch=2, seq=256))
    if not tape.covers(recipe.rows, recipe.row_tokens):
        tape = trace_tape(to_trace(recipe))
    return estimate(with_tape_of(recipe, tape))


def main() -> None:
    """Print a line per architecture and settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", choices=sorted(ARCHITECTURES), help="Only these architectures.")
    parser.add_argument("--setting", action="append", choices=list(SETTINGS), help="Only these settings.")
    options = parser.parse_args()
    for family, title, recipe in recipes(options.family or sorted(ARCHITECTURES), options.setting or list(SETTINGS)):
        try:
            line = recipe if isinstance(recipe, str) else differences(recipe)
        except LigerprofError as error:
            line = str(error)
        if not isinstance(recipe, str) and line.endswith("Add --attention eager."):
            line = f"{differences(dataclasses.replace(recipe, attention=Attention.EAGER))}  (eager)"
        print(f"{family:20} {title:26} {line}", flush=True)


if __name__ == "__main__":
    main()
