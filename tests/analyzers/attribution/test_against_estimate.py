"""Roles that attribution finds in simulated steps, against the estimate's roles of the same recipes."""

from typing import Any

import pytest

import ligerprof
from ligerprof.models import spec_from_config
from ligerprof.snapshots.reader import Snapshot

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "vocab_size": 16000}
LARGEST_DIFFERENCE = 0.02


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_every": 2, "optimizer": "none"},
        {"checkpoint_every": 2},
        {"checkpoint_every": 2, "liger": "no-flce", "batch": 1},
        {"lora": 8, "dora": True, "batch": 1, "seq": 128},
        {"lora": 8, "dora": True, "precision": "bf16"},
        {"liger": "flce", "provider": "torch"},
        {"engine": "ddp", "gpus": 2, "bucket_view": True, "grad_accum": 2},
    ],
    ids=str,
)
def test_roles_of_a_simulated_step_are_the_estimates(options: dict[str, Any]) -> None:
    options = {"batch": 2, "seq": 1024, "alloc_conf": "expandable_segments:True", **options}
    model = spec_from_config({"model_type": "llama", **SIZES}, name="llama")
    recipe = ligerprof.TrainingRecipe(model=model, **options)
    outcome, estimated = ligerprof.simulate(recipe), ligerprof.estimate(recipe)
    snapshot = Snapshot.from_dict(outcome.snapshot, source="simulated")

    found = ligerprof.explain(snapshot, step=outcome.profiled_step)

    limit = LARGEST_DIFFERENCE * outcome.peak_bytes
    roles = found.roles.items()
    wrong = {role: (estimated.roles[role], size) for role, size in roles if abs(size - estimated.roles[role]) > limit}
    assert not wrong
