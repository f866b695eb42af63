"""Which tape a recipe gets: from the cache or traced, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import UnsupportedError
from ligerprof.models import CONFIGS, spec_from_config
from ligerprof.models.tape import Tape
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.tapes import traced as traced_module
from ligerprof.runs.tapes.recipes import Way
from ligerprof.runs.tapes.traced import with_tape
from tests.models.test_tape import tape

CONFIG = {**CONFIGS["tiny"], "model_type": "persimmon"}


def recipe(**options: Any) -> TrainingRecipe:
    model = spec_from_config(CONFIG, name="strange")
    return TrainingRecipe(**{"model": model, "batch": 4, "seq": 256, **options})


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TrainingRecipe]:
    """The recipes that were traced, each with the same small tape; the cache is empty at first."""
    found: list[TrainingRecipe] = []

    def trace_tape(given: TrainingRecipe, way: Way, _own: object) -> Tape:
        found.append(given)
        if given.spec.name == "unlike" and way is Way.UNITS:
            raise UnsupportedError("another replay")
        return tape()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(traced_module, "trace_tape", trace_tape)
    return found


def silent(_text: str) -> None:
    pass


def test_a_model_with_a_row_is_left_alone(traced: list[TrainingRecipe]) -> None:
    given = TrainingRecipe(model="tiny")
    assert with_tape(given, silent) is given
    assert not traced


def test_what_a_replay_decides_is_not_traced_again(traced: list[TrainingRecipe]) -> None:
    said: list[str] = []
    assert with_tape(recipe(), said.append).spec.tape == tape()
    assert said == ["tracing strange, which takes some seconds once"]
    replayed: tuple[dict[str, Any], ...] = (
        {"batch": 6, "seq": 512},
        {"checkpointing": False},
        {"checkpoint_every": 2},
        {"optimizer": "sgd", "clip": 1.0},
        {"engine": "ddp", "gpus": 2},
        {"engine": "fsdp2", "gpus": 4, "reshard": False},
        {"memory_limit_bytes": 2**33, "alloc_conf": "expandable_segments:True"},
    )
    for options in replayed:
        with_tape(recipe(**options), silent)
    assert len(traced) == 1
    others: tuple[dict[str, Any], ...] = (
        {"precision": "bf16"},
        {"gpu": "rtx4090"},
        {"padding": 0.5},
        {"seq": 200},
        {"grad_accum": 2},
    )
    for options in others:
        with_tape(recipe(**options), silent)
    assert len(traced) == 6


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"engine": "fsdp2", "gpus": 2, "wrap": "accelerate"}, "--wrap accelerate"),
        ({"engine": "fsdp2", "gpus": 2, "eval_batch": 2}, "--engine fsdp2 with --eval-batch"),
        ({"engine": "fsdp2", "gpus": 2, "selective": "matmuls"}, "--engine fsdp2 with --selective"),
        (
            {"engine": "deepspeed", "gpus": 2, "zero": 3, "precision": "mixed", "reentrant": True},
            "--zero 3 with --reentrant",
        ),
    ],
)
def test_what_is_not_replayed_is_one_clear_line(
    options: dict[str, Any], named: str, traced: list[TrainingRecipe]
) -> None:
    with pytest.raises(UnsupportedError, match=f"^estimate: {named} is not replayed yet for model_type 'persimmon'"):
        with_tape(recipe(**options), silent)
    assert not traced


def test_passes_that_a_replay_does_not_rewrite_are_traced_as_they_run(traced: list[TrainingRecipe]) -> None:
    for options in ({"reentrant": True}, {"selective": "matmuls"}, {"activation_offload": True}):
        with_tape(recipe(**options), silent)
    assert [given.checkpointing for given in traced] == [True] * 3
    unlike = spec_from_config(CONFIG, name="unlike")
    with_tape(recipe(model=unlike, checkpoint_every=2), silent)
    assert [(given.checkpointing, given.checkpoint_every) for given in traced[3:]] == [(False, 1), (True, 2)]


def test_an_evaluation_has_a_tape_of_its_own(traced: list[TrainingRecipe]) -> None:
    for batch in (2, 6):
        given = with_tape(recipe(batch=batch, eval_batch=4), silent)
        assert given.spec.evaluation_tape == tape()
    assert [each.batch for each in traced] == [2, 4]


def test_an_estimate_from_the_cache_needs_no_torch(tmp_path: Path, traced: list[TrainingRecipe]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    with_tape(recipe(model=str(path)), silent)
    assert len(traced) == 1
    program = (
        "import sys; from ligerprof.cli.main import main; main(standalone_mode=False);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'triton')))"
    )
    arguments = ["estimate", "--model", str(path), "--batch", "4", "--seq", "256", "--json"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_bytes"] > 0
