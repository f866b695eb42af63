"""Suggestions as changed lines of the user's own configuration file."""

import dataclasses
from pathlib import Path

import pytest

from ligerprof.analyzers.suggestions.case import Framework
from ligerprof.analyzers.suggestions.find import first_edits, in_own_files, lines_for, read_own_files
from ligerprof.analyzers.suggestions.rows import ROWS, Cost, Suggestion
from ligerprof.errors import RecipeError
from ligerprof.recipe.configs.edits import edit_file
from ligerprof.recipe.configs.resolve import load_recipe
from tests.recipe.configs.test_edits import FILES
from tests.recipe.configs.texts import write

SUGGESTIONS = tuple(
    Suggestion(
        name=row.name,
        change=row.change,
        without=row.without,
        saves_bytes=None,
        new_peak_bytes=None,
        cost=Cost.FREE,
        cost_reason="",
        how=("as it was",),
        framework=Framework.TORCH,
    )
    for row in ROWS
)


@pytest.mark.parametrize("framework", sorted(FILES))
def test_lines_are_those_of_the_file_and_read_back_as_the_change(framework: str, tmp_path: Path) -> None:
    file = write(tmp_path, "sft.yaml", FILES[framework])
    own = read_own_files([file])
    found = {suggestion.name: suggestion.how for suggestion in in_own_files(SUGGESTIONS, own)}

    in_file = {name for name, how in found.items() if how != ("as it was",)}
    assert {"checkpointing", "half-batch", "8-bit-optimizer"} <= in_file
    assert ("lora" in in_file) == (framework != "transformers")
    assert "kept-outputs" not in in_file
    for row in ROWS:
        if row.name not in in_file:
            continue
        changed = row.recipe(own.recipe)
        assert changed is not None
        place, *lines = found[row.name]
        assert place == f"In {file}:"
        assert all(line.startswith(("- ", "+ ")) for line in lines)
        edit = edit_file(file, framework, own.recipe, changed)
        again, _ = load_recipe([write(tmp_path, "changed.yaml", edit.content)], {})
        for name in ("batch", "grad_accum", "checkpointing", "optimizer", "lora", "offload"):
            assert getattr(again, name) == getattr(changed, name), (row.name, name)
        if row.name == "fused-loss" and "flce" in changed.kernels:
            assert "flce" in again.kernels


def test_a_suggestion_that_the_file_already_has_stays_as_it_is(tmp_path: Path) -> None:
    text = FILES["axolotl"].replace("adamw_torch_fused", "adamw_bnb_8bit")
    own = read_own_files([write(tmp_path, "sft.yaml", text)])
    found = {suggestion.name: suggestion.how for suggestion in in_own_files(SUGGESTIONS, own)}
    assert found["8-bit-optimizer"] == ("as it was",)
    assert first_edits((), own) is None
    assert lines_for(dataclasses.replace(SUGGESTIONS[0], name="another"), own) == ()


def test_files_without_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Give one of these"):
        read_own_files([write(tmp_path, "fsdp.json", {"fsdp_version": 2, "fsdp_offload_params": False})])
