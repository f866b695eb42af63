import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import MissingDependencyError, RecipeError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.measured.ranks import Rank, gather, measure_on_ranks, run_ranks
from ligerprof.runs.outcome import Progress, StepOutcome
from ligerprof.runs.training import torch_trainer
from tests.runs.measured.ranks.test_group import TORCHRUN, outcome


def measure(tmp_path: Path, **options: Any) -> StepOutcome:
    recipe = TrainingRecipe(model="tiny", engine="deepspeed", precision="mixed", **options)
    return measure_on_ranks(recipe, build=torch_trainer, trace_directory=None, logs=tmp_path, progress=print)


def test_more_gpus_than_there_are_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match="64 CUDA devices are needed"):
        measure(tmp_path, gpus=64)


def test_a_launchers_group_must_have_the_recipes_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match="WORLD_SIZE is 8, --gpus 3"):
        measure(tmp_path, gpus=3)


def gathers(folder: Path, _progress: Progress) -> StepOutcome:
    """What a launcher's rank does when it has measured, over gloo."""
    from torch import distributed

    rank = Rank(rank=int(os.environ["RANK"]), world_size=2, local=0)
    distributed.init_process_group("gloo")
    found = gather(rank, outcome(100 + rank.rank))
    (folder / f"{rank.rank}.json").write_text(json.dumps({each: of.peak_bytes for each, of in found.items()}))
    distributed.barrier()
    return outcome(0)


@pytest.mark.slow
def test_rank_0_gathers_what_all_measured(tmp_path: Path) -> None:
    run_ranks(partial(gathers, tmp_path), 2, tmp_path, print)
    assert json.loads((tmp_path / "0.json").read_text()) == {"0": 100, "1": 101}
    assert json.loads((tmp_path / "1.json").read_text()) == {"1": 101}
