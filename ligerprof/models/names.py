"""Load a ModelSpec by the name that people use: short name, path, or hub id from the local cache or the catalog.

A row has the figures of the published config.json that memory depends on, and the published number of parameters.
How rotary positions are scaled is left out: it changes values, not sizes.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ligerprof.errors import UnknownModelError
from ligerprof.files import FileKind, is_file, is_folder, read_json
from ligerprof.models.architectures import has_row, is_composite
from ligerprof.models.from_config import spec_from_config
from ligerprof.models.spec import ModelSpec
from ligerprof.text import short_repr
from ligerprof.words import did_you_mean

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


# huggingface_hub/utils/_validators.py, validate_repo_id
_HUB_ID = re.compile(r"(?:[\w.-]{1,96}/)?[\w.-]{1,96}", flags=re.ASCII)
_PREFIX = "models--"
_CACHED_CONFIG = "config.json"


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of cached models (huggingface_hub/constants.py)."""
    for variable, inside in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if folder := environment.get(variable):
            return Path(os.path.expandvars(folder)).expanduser() / inside
    return Path("~/.cache/huggingface/hub").expanduser()


def is_hub_id(name: str) -> bool:
    """Whether a text may be the id of a model on the hub."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def cached_ids() -> tuple[str, ...]:
    """Ids of the models in the cache, in any state."""
    return tuple(sorted(_ids()))


def find_cached_config(name: str) -> tuple[str, Path] | None:
    """The id as cached and the config.json of its newest revision; upper and lower case do not matter.

    Returns:
        None if the cache has no such model, or none of its revisions has a config.json.
    """
    if not is_hub_id(name):
        return None
    wanted = name.casefold()
    matching = sorted((hub_id for hub_id in _ids() if hub_id.casefold() == wanted), key=lambda each: each != name)
    for hub_id in matching:
        folder = cache_folder() / (_PREFIX + hub_id.replace("/", "--"))
        for snapshot in _snapshots(folder):
            if (snapshot / _CACHED_CONFIG).is_file():
                return hub_id, snapshot / _CACHED_CONFIG
    return None


def _ids() -> Iterator[str]:
    try:
        names = [path.name for path in cache_folder().iterdir()]
    except OSError:
        return
    for name in names:
        hub_id = name.removeprefix(_PREFIX).replace("--", "/", 1)
        if name.startswith(_PREFIX) and is_hub_id(hub_id):
            yield hub_id


def _snapshots(folder: Path) -> Iterator[Path]:
    """Revisions in the order to try: that of the branch `main`, then the newest first."""
    try:
        found = [entry for entry in os.scandir(folder / "snapshots") if entry.is_dir()]
        newest_first = sorted(found, key=lambda entry: entry.stat().st_mtime, reverse=True)
    except OSError:
        return
    main = _commit_of_main(folder)
    for entry in sorted(newest_first, key=lambda entry: entry.name != main):
        yield Path(entry.path)


def _commit_of_main(folder: Path) -> str:
    try:
        with (folder / "refs" / "main").open("rb") as file:
            return file.read(64).decode("ascii", errors="replace").strip()
    except OSError:
        return ""


_CONFIG = FileKind(error=UnknownModelError, hint="Give a transformers config.json.", max_bytes=4 * 2**20)
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_QUANTIZED = re.compile(
    r"(?i)[-_.](gptq|awq|aqlm|gguf|exl[23]|hqq|eetq|nvfp4|mxfp4|fp8|w4a16|w8a8|int[48]|[48]-?bits?)(?![a-z0-9])"
)
_UNPACKED = "Give the model that they were made of, and --qlora R to train over 4-bit weights of bitsandbytes."
# quantizations that are never undone when the weights are loaded
_PACKED_METHODS = ("gptq", "awq", "aqlm", "hqq", "eetq", "vptq", "quip")
# repositories whose weights are stored in few bits have the figures of the model without the suffix
_PACKED_SUFFIXES = ("-unsloth-bnb-4bit", "-bnb-4bit")


def load_model(model: str, like: str | None = None) -> ModelSpec:
    """Describe a model by name, hub id, config.json or folder.

    The first that exists decides: a short name of the catalog, a file or folder, a model in the local Hugging Face
    cache, a model in the catalog. Upper and lower case of names do not matter. Weights are loaded from a folder only.

    Args:
        like: a known model whose architecture and sizes a name has that none of these knows, such as a fine-tune's.

    Raises:
        UnknownModelError: nothing has this name, or its architecture has no row; the message has the nearest names.
    """
    found = (
        _from_catalog(model.casefold(), short=True)
        or _from_path(model)
        or _from_cache(model)
        or _from_catalog(model.casefold(), short=False)
    )
    if found is not None:
        return found
    _refuse_other_weights(model)
    if like is None:
        raise _unknown(model)
    try:
        return replace(load_model(like), name=model, weights_path=None, like=like)
    except UnknownModelError as error:
        raise UnknownModelError(f"--like: {error}") from None


@cache
def _from_catalog(name: str, *, short: bool) -> ModelSpec | None:
    found = (short_names() if short else hub_names()).get(name)
    return None if found is None else spec_from_config(found[1], name=found[0])


def _from_path(model: str) -> ModelSpec | None:
    path = Path(model)
    if is_folder(path):
        has_weights = any(any(path.glob(pattern)) for pattern in _WEIGHT_PATTERNS)
        config = _read_config(path / "config.json")
        return spec_from_config(config, name=path.name or model, weights_path=str(path) if has_weights else None)
    if is_file(path):
        return spec_from_config(_read_config(path), name=path.parent.name or path.stem)
    return None


def _read_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = read_json(path, _CONFIG)
    packed = config.get("quantization_config")
    method = packed.get("quant_method") if isinstance(packed, Mapping) else None
    if method in _PACKED_METHODS:
        raise UnknownModelError(f"{path}: quantized weights ({method.upper()}), which are not covered. {_UNPACKED}")
    return config


def _from_cache(model: str) -> ModelSpec | None:
    found = find_cached_config(model)
    if found is None:
        return None
    hub_id, path = found
    config = _read_config(path)
    model_type = config.get("model_type")
    if isinstance(model_type, str) and not has_row(model_type):
        raise _without_row(hub_id, model_type, str(path))
    return spec_from_config(config, name=hub_id)


def _refuse_other_weights(model: str) -> None:
    """Raise if a name says by itself that the model is not covered."""
    if found := models_without_config().get(model.casefold()):
        raise _without_row(*found, "the model's config.json")
    for suffix in _PACKED_SUFFIXES:
        packed = hub_names().get(model.casefold().removesuffix(suffix))
        if packed is not None and model.casefold().endswith(suffix):
            raise UnknownModelError(
                f"{short_repr(model)} has 4-bit weights of {packed[0]}. Give that name, and --qlora R to train over"
                " 4-bit weights."
            )
    if (found_in := _QUANTIZED.search(model)) is not None:
        raise UnknownModelError(
            f"{short_repr(model)} has quantized weights ({found_in[1].upper()}), which are not covered. {_UNPACKED}"
        )


def _unknown(model: str) -> UnknownModelError:
    meant = did_you_mean(model, names_like(model))
    # the name of a folder on another machine may be a published one
    named = hub_names().get(Path(model).name.casefold())
    like = named[0] if named is not None and "/" in model else "llama3.1-8b"
    return UnknownModelError(
        f"unknown model {short_repr(model)}: not a path, not in the local Hugging Face cache, not in `ligerprof"
        f" models`.{meant} For a fine-tune add the model that it was made from, as in --like {like}. For another model"
        " give its config.json or folder."
    )


def _without_row(hub_id: str, model_type: str, config: str) -> UnknownModelError:
    if has_row(model_type):
        return UnknownModelError(f"{hub_id}: the catalog has no figures of this {model_type} model. Give {config}.")
    shown = short_repr(model_type)
    if is_composite(model_type):
        return UnknownModelError(f"{hub_id}: model_type {shown} has a vision tower, which is not covered.")
    return UnknownModelError(
        f"{hub_id}: model_type {shown} is not supported; docs/models.md lists those that are. Give the path of {config}"
        " to simulate it."
    )


def names_like(model: str) -> Iterator[str]:
    """The names to compare with an unknown one: hub ids if it has an organization, else names without one."""
    if "/" in model:
        yield from dict.fromkeys(hub_id for hub_id, _ in hub_names().values())
    else:
        yield from short_names()
        yield from (name for name in hub_names() if "/" not in name)
    yield from cached_ids()
