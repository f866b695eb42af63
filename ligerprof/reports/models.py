"""Render `ligerprof models`: names by group, the figures of the models found by a search, or one JSON object."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ligerprof.models import CatalogModel, ModelSpec, spec_from_config
from ligerprof.reports.terminal import bold, listing_table, stacked
from ligerprof.serialization import document, select

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_FIGURES = ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size")
_HINT = (
    "Names work in upper and lower case, and hub ids without the organization, too.\n"
    "`ligerprof models qwen3` shows figures and all hub ids of the models that match."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundModels:
    """The models of the catalog that match a search.

    Attributes:
        rows: the matching rows; all rows without a search.
        unsupported: hub ids that match but cannot be trained here, each with its `model_type`.
    """

    rows: Sequence[CatalogModel]
    unsupported: Mapping[str, str]


def find_models(rows: Sequence[CatalogModel], unsupported: Iterable[tuple[str, str]], text: str) -> FoundModels:
    """Find the models whose names contain every word of a text, in upper or lower case."""
    words = text.casefold().split()

    def matches(*names: str) -> bool:
        joined = "\n".join(names).casefold()
        return all(word in joined for word in words)

    return FoundModels(
        rows=[row for row in rows if matches(row.name, *row.aliases, *row.hub_ids)],
        unsupported={hub_id: model_type for hub_id, model_type in unsupported if words and matches(hub_id)},
    )


def models_json(found: FoundModels) -> dict[str, Any]:
    """The object of `ligerprof models --json`; `parameters` counts elements, tied parameters once."""
    figures = ("architecture=model_type", "parameters=parameter_count", *_FIGURES, "max_positions", "tied_embeddings")
    models = [
        {
            "name": row.name,
            **select(_spec(row), *figures),
            "group": row.group,
            "aliases": list(row.aliases),
            "hub_ids": list(row.hub_ids),
        }
        for row in found.rows
    ]
    return document("models", {"models": models, "unsupported": dict(found.unsupported)})


def render_names(found: FoundModels) -> "RenderableType":
    """The names of all models by group, 80 columns wide."""
    rows: list[Sequence[str | Text]] = []
    for title, group in groupby(found.rows, key=lambda row: row.group):
        rows += [(), (bold(title), "", "")]
        rows += [(row.title, row.name, _short_count(row.parameters)) for row in group]
    return stacked(listing_table("model", "short name", "parameters", right=("parameters",), rows=rows[1:]), _HINT)


def render_figures(found: FoundModels) -> "RenderableType":
    """The figures and names of each model, 80 columns wide."""
    from rich.padding import Padding

    parts: list[RenderableType] = []
    for row in found.rows:
        parts.append(bold(f"{row.title} ({row.group}, {row.config['model_type']})"))
        parts.append(Padding(stacked(*_description(row)), (0, 0, 1, 2)))
    if found.unsupported:
        names = ", ".join(f"{hub_id} ({model_type})" for hub_id, model_type in found.unsupported.items())
        parts.append(f"Known, but not supported: {names}")
    return stacked(*parts)


def _description(row: CatalogModel) -> Iterator[str]:
    """The lines below the title of a model."""
    spec = _spec(row)
    yield (
        f"{row.parameters:,} parameters; {spec.layers} layers, hidden size {spec.hidden_size}, MLP"
        f" {spec.intermediate_size}, {spec.heads} heads of {spec.head_dim} ({spec.kv_heads} key-value)"
    )
    tied = "tied" if spec.tied_embeddings else "not tied"
    window = f", attention window {spec.sliding_window}" if spec.sliding_window is not None else ""
    yield f"vocabulary {spec.vocab_size} ({tied}), {spec.max_positions} positions{window}"
    yield f"short name: {', '.join((row.name, *row.aliases))}"
    same = [hub_id for hub_id, config in row.hub_ids.items() if config == row.config and hub_id != row.title]
    if same:
        yield f"same figures: {', '.join(same)}"
    for hub_id, config in row.hub_ids.items():
        changed = {key: value for key, value in config.items() if value != row.config.get(key)}
        if changed:
            yield f"{hub_id}: {', '.join(f'{key} {value}' for key, value in changed.items())}"


def _spec(row: CatalogModel) -> ModelSpec:
    return spec_from_config(row.config, name=row.name)


def _short_count(count: int) -> str:
    """A number of parameters with three digits or more: `1.24 B`, `405.85 B`, `124.4 M`."""
    return f"{count / 10**9:.2f} B" if count >= 10**9 else f"{count / 10**6:.1f} M"
