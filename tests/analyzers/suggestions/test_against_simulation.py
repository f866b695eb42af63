import dataclasses
import json
import shlex
from typing import Any

import pytest

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.analyzers.suggestions.case import Framework
from ligerprof.analyzers.suggestions.rows import ROWS, Basis
from ligerprof.cli.step import command
from ligerprof.models import spec_from_config
from ligerprof.recipe.training import RECIPE_OPTIONS, TrainingRecipe
from ligerprof.roles import Phase
from ligerprof.runs.simulated import simulate_step
from ligerprof.snapshots.reader import Snapshot
from tests.analyzers.suggestions.test_find import SAVING_TOLERANCE
from tests.analyzers.suggestions.test_known_model import LLAMA
from tests.sampling import sampled

TINY: dict[str, Any] = {"model": "tiny", "device": "simulated", "seq": 1024, "batch": 16}

# the allocator leaves up to 1 MiB of a large block unsplit, which counts in a model as small as this one
MOST_UNSPLIT_BYTES = 2 * 2**20


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


@sampled(
    ("recipe", "names"),
    [
        (
            TrainingRecipe(**TINY, precision="amp", checkpointing=False),
            {"fused-loss", "checkpointing", "half-batch", "bf16-weights", "lora"},
        ),
        (TrainingRecipe(**TINY, precision="bf16", checkpointing=True), {"fused-loss", "half-batch", "lora"}),
    ],
    ids=["amp", "bf16-checkpointed"],
    every=2,
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
        assert suggestion.saves_bytes == pytest.approx(achieved_bytes, rel=SAVING_TOLERANCE, abs=MOST_UNSPLIT_BYTES), (
            suggestion.name
        )


# where optimizer states, checkpoints, activations, or attention's scores are most of the memory
SHAPES: dict[str, dict[str, Any]] = {
    "states": {"batch": 1, "seq": 256},
    "checkpoints": {"batch": 4, "seq": 512},
    "activations": {"batch": 4, "seq": 512, "checkpointing": False},
    "scores": {"batch": 1, "seq": 1024, "checkpointing": False, "attention": "eager"},
}


@pytest.fixture(scope="module", params=SHAPES)
def fp32_training(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainingRecipe, PeakReport]:
    """A recipe with fp32 weights under autocast, and the report on its step."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    recipe = TrainingRecipe(model=str(path), device="simulated", precision="amp", **SHAPES[request.param])
    return recipe, analyze(Snapshot.from_dict(simulate_step(recipe).snapshot), recipe=recipe).peak


@sampled("name", ["paged-optimizer", "8-bit-optimizer", "bf16-weights", "lora"], every=2)
def test_changes_to_weights_and_states_save_what_they_say(
    fp32_training: tuple[TrainingRecipe, PeakReport], name: str
) -> None:
    recipe, report = fp32_training
    suggestion = next(one for one in report.suggestions if one.name == name)
    row = next(row for row in ROWS if row.name == name)

    changed = row.recipe(recipe)
    assert changed is not None
    after = simulate_step(changed, record=False)

    assert suggestion.saves_bytes is not None
    achieved_bytes = report.peak_bytes - max(after.peak_bytes, after.first_step_peak_bytes)
    assert suggestion.saves_bytes == pytest.approx(achieved_bytes, rel=SAVING_TOLERANCE)
    # the model is known by the sizes of its weights
    assert suggestion.basis is Basis.REPLAYED


@pytest.mark.parametrize(
    "adapter",
    [{"lora": 8}, {"lora": 8, "precision": "bf16-amp", "lora_targets": "q_proj+down_proj"}, {"qlora": 8}],
    ids=["lora", "autocast", "qlora"],
)
def test_adapters_without_dropout_save_their_masks_at_least(adapter: dict[str, Any]) -> None:
    options: dict[str, Any] = {"precision": "bf16", "checkpointing": False, "liger": "flce", **adapter}
    recipe = TrainingRecipe(**TINY, lora_dropout=0.05, **options)
    report = analyze(Snapshot.from_dict(simulate_step(recipe).snapshot), recipe=recipe).peak
    suggestion = next(one for one in report.suggestions if one.name == "lora-dropout")
    changed = typed_recipe(suggestion.how[0])
    assert changed == dataclasses.replace(recipe, lora_dropout=0.0)
    achieved_bytes = report.peak_bytes - simulate_step(changed, record=False).peak_bytes
    assert suggestion.basis is Basis.AT_LEAST
    assert suggestion.saves_bytes is not None
    assert achieved_bytes / 3 <= suggestion.saves_bytes <= achieved_bytes + MOST_UNSPLIT_BYTES


WIDTHS: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 16000,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "cohere": {"tie_word_embeddings": True},
    "gemma2": {"head_dim": 64, "tie_word_embeddings": True},
    "glm4": {},
    "gpt_neox": {"intermediate_size": 2048, "num_key_value_heads": 8},
    "granite": {},
    "mistral": {"sliding_window": None},
    "olmo2": {},
    "phi3": {},
    "qwen3": {"head_dim": 128},
    "smollm3": {},
    "stablelm": {},
}


@pytest.mark.slow
@sampled("checkpointing", [False, True], every=2)
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_known_models_keep_what_they_say(model_type: str, *, checkpointing: bool) -> None:
    config = {"model_type": model_type, **WIDTHS, **ARCHITECTURES[model_type]}
    attention = "eager" if model_type == "gemma2" else "sdpa"
    recipe = TrainingRecipe(
        model=spec_from_config(config, name=model_type),
        device="simulated",
        batch=4,
        seq=512,
        precision="amp",
        attention=attention,
        checkpointing=checkpointing,
    )
    analysis = analyze(Snapshot.from_dict(simulate_step(recipe).snapshot))
    found = {one.name: one for one in analysis.suggestions}

    for name in ("bf16-weights", "lora"):
        row = next(row for row in ROWS if row.name == name)
        changed = row.recipe(recipe)
        assert changed is not None
        after = simulate_step(changed, record=False)
        achieved_bytes = analysis.peak.peak_bytes - max(after.peak_bytes, after.first_step_peak_bytes)
        assert found[name].basis is Basis.REPLAYED
        assert found[name].saves_bytes == pytest.approx(achieved_bytes, rel=SAVING_TOLERANCE), name


def test_a_step_out_of_memory_lists_what_would_have_let_it_pass() -> None:
    recipe = TrainingRecipe(**TINY, precision="amp", checkpointing=False, memory_limit_bytes=400 * 2**20)
    outcome = simulate_step(recipe)

    # one step is explained, and it contains the failure
    report = analyze(Snapshot.from_dict(outcome.snapshot), step=outcome.profiled_step, recipe=recipe).peak

    assert outcome.oom is not None
    # backward had begun: no layer had run backward yet
    assert outcome.oom.phase is Phase.BACKWARD
    assert {one.name: one.lets_pass for one in report.suggestions} == {
        "fused-loss": True,
        "half-batch": True,
        "checkpointing": True,
    }
    for suggestion in report.suggestions:
        assert simulate_step(typed_recipe(suggestion.how[0]), record=False).oom is None, suggestion.name


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
