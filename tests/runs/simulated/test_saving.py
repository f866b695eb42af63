"""Gathering a model to save it: the frameworks' own code on a simulated GPU against the estimate."""

import json
import subprocess
import sys
from typing import Any

import pytest

from ligerprof.analyzers.estimate import Moment, estimate
from ligerprof.models import CONFIGS, spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.units import MIB

pytestmark = pytest.mark.usefixtures("no_log_records")

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 20_001}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
# the loss of the step before, and blocks of 512 bytes
TOLERANCE_BYTES = MIB // 16


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        pytest.param({"engine": "fsdp2"}, True, marks=pytest.mark.slow),
        ({"engine": "fsdp2", "gpus": 8, "wrap": "accelerate", "reshard": False, "optimizer": "sgd"}, False),
        pytest.param({"engine": "fsdp2", "lora": 8, "precision": "amp"}, False, marks=pytest.mark.slow),
        ({"engine": "fsdp1", "gpus": 4}, False),
        ({"engine": "deepspeed", "zero": 3}, True),
        ({"engine": "deepspeed", "zero": 3, "gpus": 8, "lora": 8, "precision": "mixed-fp16"}, False),
    ],
    ids=["fsdp2", "fsdp2-8", "fsdp2-lora", "fsdp1", "zero-3", "zero-3-lora"],
)
def test_what_saving_gathers(options: dict[str, Any], tied: bool) -> None:
    if options["engine"] == "deepspeed":
        pytest.importorskip("deepspeed")
    model = spec_from_config({**CONFIGS["llama3.2-1b"], **SIZES, **HEADS, "tie_word_embeddings": tied}, name="small")
    given = {"batch": 1, "seq": 64, "gpus": 2, "precision": "mixed", "alloc_conf": "expandable_segments:True"}
    # saving takes the place of an evaluation
    recipe = TrainingRecipe(model=model, eval_batch=1, **{**given, **options})
    command = [sys.executable, "-m", "tests.runs.simulated.saving", json.dumps(recipe.to_json())]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    estimated = estimate(recipe)
    assert estimated.saving_peak_bytes is not None
    assert found["saving"] > found["nothing"]
    assert estimated.saving_peak_bytes == pytest.approx(found["saving"], abs=TOLERANCE_BYTES)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine": "ddp", "gpus": 2},
        {"engine": "deepspeed", "precision": "mixed", "gpus": 2, "zero": 2},
        {"engine": "deepspeed", "precision": "mixed", "gpus": 1, "zero": 3},
        {"engine": "deepspeed", "precision": "mixed", "gpus": 2, "zero": 3, "save_whole": False},
        {"engine": "fsdp2", "gpus": 2, "save_whole": False},
    ],
    ids=["torch", "ddp", "zero-2", "zero-3-alone", "zero-3-shards", "fsdp2-shards"],
)
def test_a_whole_model_is_not_gathered(options: dict[str, Any]) -> None:
    assert estimate(TrainingRecipe(model="tiny", **options)).saving_peak_bytes is None


def test_saving_decides_where_training_needs_less() -> None:
    """Adapters over frozen weights that are offloaded: a step gathers them in 16 bits, saving in 32."""
    sizes = {**SIZES, **HEADS, "vocab_size": 200_000, "tie_word_embeddings": True}
    model = spec_from_config({**CONFIGS["llama3.2-1b"], **sizes}, name="wide")
    offloaded = {"engine": "fsdp2", "gpus": 2, "precision": "mixed", "offload": "all", "lora": 8, "liger": "flce"}
    estimated = estimate(TrainingRecipe(model=model, batch=1, seq=16, memory_limit_bytes=330 * MIB, **offloaded))
    assert estimated.highest == (Moment.SAVING, estimated.saving_peak_bytes)
    assert estimated.verdict is not None
    assert estimated.gpu is not None
    assert estimated.gpu.decided_by is Moment.SAVING
