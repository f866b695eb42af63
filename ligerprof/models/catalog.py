"""The catalog: published models by hub id and by short name, read from catalog.json.

A row has the figures of the published config.json that memory depends on, and the published number of parameters.
How rotary positions are scaled is left out: it changes values, not sizes.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]

DEFAULT_MODEL = "llama3.2-1b"


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogModel:
    """One row: models that differ in nothing but their weights, and variants that differ in a few figures.

    Attributes:
        name: the short name.
        aliases: other short names.
        group: the heading of the listing.
        parameters: the published number of parameters, tied ones counted once.
        config: the transformers config of `name`, of the aliases and of all hub ids but the variants.
        hub_ids: ORGANIZATION/NAME as published, with the config of each.
    """

    name: str
    aliases: tuple[str, ...]
    group: str
    parameters: int
    config: Config
    hub_ids: Mapping[str, Config]

    @property
    def title(self) -> str:
        """The first hub id; the short name of a model that is not published."""
        return next(iter(self.hub_ids), self.name)


@cache
def _content() -> Mapping[str, Any]:
    content: dict[str, Any] = json.loads(Path(__file__).with_name("catalog.json").read_text(encoding="utf-8"))
    return content


def _rows() -> Iterator[CatalogModel]:
    for group in _content()["groups"]:
        for row in group["models"]:
            config = {**group["common"], **row["config"]}
            variants = {hub_id: {**config, **changed} for hub_id, changed in row.get("variants", {}).items()}
            yield CatalogModel(
                name=row["name"],
                aliases=tuple(row.get("aliases", ())),
                group=group["group"],
                parameters=row["parameters"],
                config=config,
                hub_ids={**dict.fromkeys(row["ids"], config), **variants},
            )


CATALOG: tuple[CatalogModel, ...] = tuple(_rows())

# the config of every row by short name
CONFIGS: dict[str, Config] = {row.name: row.config for row in CATALOG}


@cache
def short_names() -> Mapping[str, tuple[str, Config]]:
    """Short names and aliases in lower case, each with the short name and the config."""
    return {name.casefold(): (name, row.config) for row in CATALOG for name in (row.name, *row.aliases)}


@cache
def hub_names() -> Mapping[str, tuple[str, Config]]:
    """Hub ids, with and without the organization, in lower case, each with the hub id and the config.

    Without the organization the first row that has the name decides.
    """
    found: dict[str, tuple[str, Config]] = {}
    for row in CATALOG:
        for hub_id, config in row.hub_ids.items():
            found[hub_id.casefold()] = hub_id, config
            found.setdefault(hub_id.rpartition("/")[2].casefold(), (hub_id, config))
    return found


@cache
def models_without_config() -> Mapping[str, tuple[str, str]]:
    """Hub ids of well-known models whose configs the catalog lacks, in lower case, each with its id and model_type."""
    content: Mapping[str, list[str]] = _content()["without_row"]
    return {hub_id.casefold(): (hub_id, model_type) for model_type, ids in content.items() for hub_id in ids}
