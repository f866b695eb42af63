"""Write changed values into the text of a YAML, TOML or JSON file; in YAML and TOML, all other lines stay."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.recipe.configs.documents import parse_document

_YAML_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
_INDENT = "  "


def rewrite(content: str, path: Path, edited: Mapping[str, Any]) -> str:
    """The text with new values.

    Args:
        content: the text, which `path` holds.
        edited: new values by key; a dot separates a section from its key.

    Raises:
        RecipeError: the file is written in a way that lines cannot be replaced in.
    """
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
            _replace_in_toml(lines, section, name, _toml_text(value))
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


def _toml_text(value: Any) -> str:
    # numbers, switches and texts are written alike
    return json.dumps(value, ensure_ascii=False)
