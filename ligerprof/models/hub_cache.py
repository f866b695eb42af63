"""Find a model's config.json in the local Hugging Face cache, without network and without huggingface_hub."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

# huggingface_hub/utils/_validators.py, validate_repo_id
_HUB_ID = re.compile(r"(?:[\w.-]{1,96}/)?[\w.-]{1,96}", flags=re.ASCII)
_PREFIX = "models--"
_CONFIG = "config.json"


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
            if (snapshot / _CONFIG).is_file():
                return hub_id, snapshot / _CONFIG
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
