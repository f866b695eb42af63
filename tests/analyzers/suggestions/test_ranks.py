"""What dividing a model among ranks saves, against simulated steps of DDP and FSDP2."""

import json
from pathlib import Path
from typing import Any

import pytest

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.analyzers.suggestions.case import Case, peak_after
from ligerprof.analyzers.suggestions.edits import RANKS, with_divided_states, with_sharded_model
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.runs.simulated import simulate_step
from ligerprof.snapshots.reader import Snapshot
from tests.analyzers.suggestions.test_find import SAVING_TOLERANCE

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
}


def test_sharding_a_model_saves_what_simulated_ranks_show(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    options: dict[str, Any] = {
        "model": str(path),
        "device": "simulated",
        "batch": 2,
        "seq": 128,
        "precision": "amp",
        "gpus": RANKS,
    }
    replicated = TrainingRecipe(**options, engine="ddp", checkpointing=True)
    sharded = TrainingRecipe(**options, engine="fsdp2", checkpointing=True)
    analysis = analyze(Snapshot.from_dict(simulate_step(replicated).snapshot))
    whole, before_bytes = analysis.attribution, analysis.peak.peak_bytes
    case = Case(attribution=whole, whole=whole, window=slice(None), peak_moment=analysis.peak_moment)

    found = peak_after(lambda: with_sharded_model(case), case)

    after = simulate_step(sharded, record=False)
    achieved_bytes = before_bytes - max(after.peak_bytes, after.first_step_peak_bytes)
    assert found is not None
    assert before_bytes - found == pytest.approx(achieved_bytes, rel=SAVING_TOLERANCE)

    divided = peak_after(lambda: with_divided_states(case), case)
    assert divided is not None
    states_bytes = analysis.peak.roles[Role.OPTIMIZER_STATES]
    assert before_bytes - divided == pytest.approx(states_bytes / RANKS, rel=SAVING_TOLERANCE)
