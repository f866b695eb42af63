"""Render `ligerprof models`: a table with one row per model, or one JSON object."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ligerprof.models import ModelSpec
from ligerprof.reports.listing import add_listing_row, listing_table
from ligerprof.serialization import select

if TYPE_CHECKING:
    from rich.table import Table


def models_json(specs: Sequence[ModelSpec]) -> dict[str, Any]:
    """The object of `ligerprof models --json`; `parameters` counts elements, tied parameters once."""
    return {"schema": 1, "kind": "models", "models": [_model_json(spec) for spec in specs]}


def models_table(specs: Sequence[ModelSpec]) -> "Table":
    """One row per model, at most 100 columns wide."""
    figures = ("parameters", "layers", "hidden", "heads/kv", "vocab")
    table = listing_table("model", "architecture", *figures, "tied", right=figures)
    for spec in specs:
        add_listing_row(table, *_cells(spec))
    return table


def _model_json(spec: ModelSpec) -> dict[str, Any]:
    return select(
        spec,
        *(
            "name",
            "architecture=model_type",
            "parameters=parameter_count",
            "layers",
            "hidden_size",
            "intermediate_size",
        ),
        *("heads", "kv_heads", "head_dim", "vocab_size", "max_positions", "tied_embeddings"),
    )


def _cells(spec: ModelSpec) -> tuple[str, ...]:
    return (
        spec.name,
        spec.model_type,
        f"{spec.parameter_count:,}",
        str(spec.layers),
        str(spec.hidden_size),
        f"{spec.heads}/{spec.kv_heads}",
        str(spec.vocab_size),
        "yes" if spec.tied_embeddings else "no",
    )
