import dataclasses
import shlex
from typing import Any

import pytest

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.analyzers.suggestions.program import Framework
from ligerprof.cli.step import command
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from ligerprof.runs.simulated import simulate_step
from ligerprof.snapshots.reader import Snapshot
from tests.analyzers.suggestions.test_find import SAVING_TOLERANCE

TINY: dict[str, Any] = {"model": "tiny", "device": "simulated", "seq": 1024, "batch": 16}


def read_options(words: list[str]) -> TrainingRecipe:
    """The recipe that `ligerprof step` makes of its options."""
    with command.make_context("step", words) as context:
        given = {name: context.params[name] for name in RECIPE_OPTIONS if context.params[name] is not None}
        return TrainingRecipe(**given)


def typed_recipe(line: str) -> TrainingRecipe:
    """The recipe that `ligerprof step` makes of a printed command."""
    program, step, *words = shlex.split(line)
    assert (program, step) == ("ligerprof", "step")
    return read_options(words)


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        (
            TrainingRecipe(**TINY, precision="amp", checkpointing=False),
            {"fused-loss", "checkpointing", "half-batch"},
        ),
        (TrainingRecipe(**TINY, precision="bf16", checkpointing=True), {"fused-loss", "half-batch"}),
    ],
    ids=["amp", "bf16-checkpointed"],
)
def test_printed_commands_run_and_save_what_they_say(recipe: TrainingRecipe, names: set[str]) -> None:
    outcome = simulate_step(recipe)
    report = analyze(Snapshot.from_dict(outcome.snapshot), recipe=recipe).peak
    assert {one.name for one in report.suggestions} == names

    for suggestion in report.suggestions:
        assert suggestion.framework is Framework.LIGERPROF
        assert suggestion.saves_bytes is not None
        changed = typed_recipe(suggestion.how[0])
        assert changed != recipe
        after = simulate_step(changed, record=False)
        achieved_bytes = report.peak_bytes - max(after.peak_bytes, after.first_step_peak_bytes)
        assert suggestion.saves_bytes == pytest.approx(achieved_bytes, rel=SAVING_TOLERANCE), suggestion.name


def test_without_the_recipe_the_options_of_step_are_named() -> None:
    recipe = TrainingRecipe(**TINY, precision="bf16", checkpointing=True)
    snapshot = Snapshot.from_dict(simulate_step(recipe).snapshot)

    for suggestion in analyze(snapshot).suggestions:
        assert read_options(shlex.split(suggestion.how[0], comments=True)) != TrainingRecipe()


def test_a_model_that_no_option_can_name_gets_options_only() -> None:
    recipe = TrainingRecipe(**TINY, precision="bf16", checkpointing=True)
    snapshot = Snapshot.from_dict(simulate_step(recipe).snapshot)
    unnamed = dataclasses.replace(recipe.spec, name="somebody-s-model")

    suggestions = analyze(snapshot, recipe=dataclasses.replace(recipe, model=unnamed)).suggestions

    assert suggestions
    assert not any(line.startswith("ligerprof step") for one in suggestions for line in one.how)
