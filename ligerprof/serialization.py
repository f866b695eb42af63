"""Convert objects to JSON: dataclasses by field, categories by word, tuples as lists."""

import dataclasses
from collections.abc import Iterable, Mapping
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any

SCHEMA = 1


def to_json(value: Any) -> Any:
    """Convert an object by its own `to_json` method, if any, or by its type; raises TypeError for an unknown type."""
    if hasattr(value, "to_json"):
        plain = value.to_json()
    elif isinstance(value, Enum):
        plain = value.value
    elif value is None or isinstance(value, (str, bool, int, float)):
        plain = value
    elif dataclasses.is_dataclass(value):
        plain = select(value, *(item.name for item in dataclasses.fields(value)))
    elif isinstance(value, Mapping):
        plain = {to_json(key): to_json(item) for key, item in value.items()}
    elif isinstance(value, Iterable):
        plain = [to_json(item) for item in value]
    elif isinstance(value, Path):
        plain = str(value)
    else:
        raise TypeError(f"no JSON form for {type(value).__name__}")
    return plain


def select(value: Any, *names: str) -> dict[str, Any]:
    """A JSON object of some attributes, in order, each under its own name.

    `change.name` reads the attribute `name` of the attribute `change`; `bytes=size_bytes` gives the key first.
    """
    found = {}
    for name in names:
        key, _, path = name.rpartition("=")
        found[key or path.rpartition(".")[2]] = to_json(attrgetter(path)(value))
    return found


def document(kind: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    """The object that a command prints with --json: `schema` and `kind`, then the keys of the parts."""
    whole: dict[str, Any] = {"schema": SCHEMA, "kind": kind}
    for part in parts:
        whole |= part
    return whole
