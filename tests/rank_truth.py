"""Steps under FSDP2 and DDP that two H200s ran with torch 2.11, as tests/data/truth/h200x2-ranks.jsonl keeps them."""

import json
from collections.abc import Mapping
from typing import Any

from ligerprof.models import load_model, spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from tests.paths import TRUTH

# of rank 0, whose shards are the largest
ROWS = [
    row
    for row in map(json.loads, (TRUTH / "h200x2-ranks.jsonl").read_text(encoding="utf-8").splitlines())
    if row["rank"] == 0
]


def name_of(row: Mapping[str, Any]) -> str:
    kept = "ckpt" if row["ckpt"] else "plain"
    return f"{row['mode']}-{row['model']}-{kept}-accumulation{row['accumulation']}-reduce{row['reduce']}"


def recipe_of(row: Mapping[str, Any], **others: Any) -> TrainingRecipe:
    config = dict(load_model({"8b-8layers": "llama3.1-8b"}.get(row["model"], row["model"])).config)
    if row["model"] == "8b-8layers":
        config["num_hidden_layers"] = 8
    options: dict[str, Any] = {"precision": "amp"}
    if row["mode"] == "ddp":
        config["tie_word_embeddings"] = False
    elif row["params"] == "bf16":
        options = {"precision": "bf16"}
    else:
        options = {"precision": "mixed", "reduce_dtype": {"fp32": "float32", "bf16": "bfloat16"}[row["reduce"]]}
    return TrainingRecipe(
        model=spec_from_config(config, name=row["model"]),
        engine=row["mode"],
        gpus=row["world"],
        batch=row["batch"],
        seq=row["seq"],
        checkpointing=row["ckpt"],
        grad_accum=row["accumulation"],
        clip=1.0 if row["clip"] else None,
        **options,
        **others,
    )
