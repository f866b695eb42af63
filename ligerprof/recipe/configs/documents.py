"""Read YAML, JSON and TOML files of unknown origin within limits, and write changed values into their text."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
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
    """The object in a file, with text as keys; raises RecipeError if there is none, or it is too large or too deep."""
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
    if suffix == ".json" or (content.lstrip()[:1] == "{" and suffix not in (".yaml", ".yml")):
        return parse_json(content, str(path), _FILE)
    return _parse_yaml(content, path)


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


_YAML_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
_INDENT = "  "


def rewrite(content: str, path: Path, edited: Mapping[str, Any]) -> str:
    """The text of `path` with new values by key; raises RecipeError if lines of it cannot be replaced."""
    if not edited:
        return content
    values = parse_document(content, path)
    wanted = with_values(values, edited)
    if content.lstrip()[:1] == "{":
        indent = re.match(r"\s*\{\s*\n([ \t]+)", content)
        return json.dumps(wanted, indent=indent[1] if indent else 2, ensure_ascii=False) + "\n"
    lines = content.splitlines()
    for key, value in edited.items():
        section, _, name = key.rpartition(".")
        if path.suffix.lower() == ".toml":
            # numbers, switches and texts are written as in JSON
            _replace_in_toml(lines, section, name, json.dumps(value, ensure_ascii=False))
        elif section and isinstance(values.get(section), Mapping) and _is_block(lines, section):
            _replace_in_section(lines, section, name, yaml_text(value))
        elif section:
            _replace_section(lines, section, wanted[section])
        else:
            # a document may end before the file does
            _replace(lines, range(lines.index("...") if "..." in lines else len(lines)), "", name, yaml_text(value))
    end = "\r\n" if "\r\n" in content else "\n"
    changed = end.join(lines) + end
    if wrong := _wrong_keys(changed, path, wanted, edited):
        raise RecipeError(f"{path}: {', '.join(wrong)} cannot be replaced line by line. Edit the file by hand.")
    return changed


def _wrong_keys(content: str, path: Path, wanted: Mapping[str, Any], edited: Iterable[str]) -> list[str]:
    """The edited keys with other values than wanted; all of them if something else differs."""
    try:
        said = parse_document(content, path)
    except RecipeError:
        return list(edited)
    if said == wanted:
        return []
    return [key for key in edited if value_at(said, key) != value_at(wanted, key)] or list(edited)


def value_at(values: Mapping[str, Any], key: str) -> Any:
    """The value of a key; a dot separates a section from its key. None without it."""
    section, _, name = key.rpartition(".")
    inner = values.get(section) if section else values
    return inner.get(name) if isinstance(inner, Mapping) else None


def with_values(values: Mapping[str, Any], edited: Mapping[str, Any]) -> dict[str, Any]:
    """A document with new values by key, as `rewrite` takes them."""
    changed = dict(values)
    for key, value in edited.items():
        section, _, name = key.rpartition(".")
        if section:
            inner = changed.get(section)
            changed[section] = {**(inner if isinstance(inner, Mapping) else {}), name: value}
        else:
            changed[name] = value
    return changed


def _replace(lines: list[str], where: range, indent: str, key: str, value: str) -> None:
    """Replace the lines of a key, or add one after the last line of its section."""
    quote = "[\"']?"
    pattern = re.compile(rf"{indent}{quote}{re.escape(key)}{quote}\s*:")
    for start in where:
        if (found := pattern.match(lines[start])) is not None:
            comment = _comment(lines[start][found.end() :], r"\s#")
            lines[start : _end_of_value(lines, start, len(indent))] = [f"{indent}{key}: {value}{comment}"]
            return
    last = next((number for number in reversed(where) if not indent or lines[number].strip()), where.stop - 1)
    lines.insert(last + 1, f"{indent}{key}: {value}")


def _comment(rest: str, opening: str) -> str:
    """The comment after a value with the spaces before it, which `opening` matches; nothing without one.

    A `#` in a quoted value counts as one, and the end of the value then becomes a comment.
    """
    found = re.search(opening, rest)
    return "" if found is None else rest[len(rest[: found.start()].rstrip()) :]


def _end_of_value(lines: Sequence[str], start: int, indent: int) -> int:
    """The line after the last one of a value: what follows is indented further, or an item of a list."""
    end = start + 1
    for number in range(start + 1, len(lines)):
        line = lines[number]
        if line.strip() and not line.lstrip().startswith("#"):
            if _indent_of(line) <= indent and not line[indent:].startswith("-"):
                break
            end = number + 1
    return end


def _indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def _start_of(lines: Sequence[str], section: str) -> int | None:
    pattern = re.compile(rf"{re.escape(section)}\s*:")
    return next((number for number, line in enumerate(lines) if pattern.match(line)), None)


def _is_block(lines: Sequence[str], section: str) -> bool:
    """Whether the keys of a section of YAML are on lines of their own."""
    start = _start_of(lines, section)
    return start is not None and re.fullmatch(r"[^:]+:\s*(#.*)?", lines[start]) is not None


def _replace_in_section(lines: list[str], section: str, key: str, value: str) -> None:
    start = _start_of(lines, section) or 0
    stop = _end_of_value(lines, start, 0)
    first = next((line for line in lines[start + 1 : stop] if line.strip() and not line.lstrip().startswith("#")), "")
    _replace(lines, range(start + 1, stop), first[: _indent_of(first)] or _INDENT, key, value)


def _replace_section(lines: list[str], section: str, values: Mapping[str, Any]) -> None:
    """Write a section of YAML that is not there, or is on one line, with a line per key."""
    block = [f"{section}:", *(f"{_INDENT}{key}: {yaml_text(value)}" for key, value in values.items())]
    start = _start_of(lines, section)
    if start is None:
        lines.extend(block)
    else:
        lines[start : _end_of_value(lines, start, 0)] = block


def _replace_in_toml(lines: list[str], section: str, key: str, value: str) -> None:
    header = re.compile(rf"\s*\[\s*{re.escape(section)}\s*\]\s*(#.*)?$")
    start = next((number for number, line in enumerate(lines) if header.match(line)), None)
    if start is None:
        lines.extend(["", f"[{section}]", f"{key} = {value}"])
        return
    stop = next((number for number in range(start + 1, len(lines)) if lines[number].lstrip()[:1] == "["), len(lines))
    pattern = re.compile(rf"(?P<indent>\s*){re.escape(key)}\s*=")
    last = start
    for number in range(start + 1, stop):
        if (found := pattern.match(lines[number])) is not None:
            lines[number] = f"{found['indent']}{key} = {value}{_comment(lines[number][found.end() :], '#')}"
            return
        last = number if lines[number].strip() else last
    lines.insert(last + 1, f"{key} = {value}")


def yaml_text(value: Any) -> str:
    """A value on one line of YAML."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./-]*", value) and value.lower() not in _YAML_WORDS:
        return value
    # JSON is YAML, too
    return json.dumps(value, ensure_ascii=False)
