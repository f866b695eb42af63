"""Read YAML, JSON and TOML files of unknown origin into plain objects, within limits of size, depth and aliases."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.files import FileKind, parse_json, parse_toml, read_text
from ligerprof.text import printable

_HINT = "--config takes the configuration file of a training run."
_FILE = FileKind(error=RecipeError, hint=_HINT, max_bytes=2**18)
_DEEPEST = 40
# of a document with its aliases written out; the longest published configurations have a few hundred
_MOST_VALUES = 20_000
# Python does not write out integers of any length
_MOST_BITS = 4096


def read_document(path: Path) -> dict[str, Any]:
    """The object that a file holds, with text as keys.

    Raises:
        RecipeError: not readable, too large, too deep, not an object, or not in the format of its suffix.
    """
    return parse_document(read_text(path, _FILE), path)


def parse_document(content: str, path: Path) -> dict[str, Any]:
    """The object that a text holds, as `read_document` reads it; `path` is for its suffix and for errors."""
    values = _parsed(content, path)
    if not isinstance(values, dict) or not values:
        raise RecipeError(f"{path}: holds no keys. {_HINT}")
    plain: dict[str, Any] = _Copier(path).copy(values, 0)
    return plain


# a search for changes reads the same files for each change, and YAML of the largest size takes a second
@lru_cache(maxsize=8)
def _parsed(content: str, path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".toml":
        return parse_toml(content, str(path), _FILE)
    if suffix == ".json" or (content.lstrip()[:1] == "{" and not _is_yaml(suffix)):
        return parse_json(content, str(path), _FILE)
    return _parse_yaml(content, path)


def _is_yaml(suffix: str) -> bool:
    return suffix in (".yaml", ".yml")


class _Copier:
    """Copies a document into plain objects that share nothing, and counts what it copies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = _MOST_VALUES

    def copy(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RecipeError(f"{self._path}: more than {_MOST_VALUES} values. {_HINT}")
        if depth > _DEEPEST:
            raise RecipeError(f"{self._path}: nested deeper than {_DEEPEST} levels. {_HINT}")
        if isinstance(value, dict):
            return {str(key): self.copy(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple, set)):
            return [self.copy(item, depth + 1) for item in value]
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise RecipeError(f"{self._path}: a number of more than {_MOST_BITS} bits. {_HINT}")
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        # dates and times
        return str(value)


def _parse_yaml(content: str, path: Path) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """The safe loader with limits: of depth, and of what aliases and merge keys add."""

        depth = 0
        merged = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth += 1
            if self.depth > _DEEPEST:
                raise yaml.YAMLError(f"nested deeper than {_DEEPEST} levels")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            self.merged += len(node.value)
            if self.merged > _MOST_VALUES:
                raise yaml.YAMLError(f"merge keys add more than {_MOST_VALUES} values")

    try:
        # Loader is a safe loader
        return yaml.load(content, Loader)  # noqa: S506
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise RecipeError(f"{path}: not readable as YAML ({_reason(error)}). {_HINT}") from None


def _reason(error: Exception) -> str:
    return printable(" ".join(str(error).replace(' in "<unicode string>"', "").split()))[:100]
