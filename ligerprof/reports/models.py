"""Render `ligerprof models`: a table with one row per model, or one JSON object."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ligerprof.models import ModelSpec
from ligerprof.reports.listing import listing_table
from ligerprof.serialization import document, select

if TYPE_CHECKING:
    from rich.table import Table

_FIGURES = ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size")


def models_json(specs: Sequence[ModelSpec]) -> dict[str, Any]:
    """The object of `ligerprof models --json`; `parameters` counts elements, tied parameters once."""
    keys = ("name", "architecture=model_type", "parameters=parameter_count", *_FIGURES)
    return document("models", {"models": [select(spec, *keys, "max_positions", "tied_embeddings") for spec in specs]})


def models_table(specs: Sequence[ModelSpec]) -> "Table":
    """One row per model, at most 100 columns wide."""
    rows = [
        (
            spec.name,
            spec.model_type,
            f"{spec.parameter_count:,}",
            str(spec.layers),
            str(spec.hidden_size),
            f"{spec.heads}/{spec.kv_heads}",
            str(spec.vocab_size),
            "yes" if spec.tied_embeddings else "no",
        )
        for spec in specs
    ]
    figures = ("parameters", "layers", "hidden", "heads/kv", "vocab")
    return listing_table("model", "architecture", *figures, "tied", right=figures, rows=rows)
