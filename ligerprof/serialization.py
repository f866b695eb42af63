"""Convert objects to JSON: dataclasses by field, categories by word, tuples as lists."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligerprof.text import Printed

SCHEMA = 1
_PLAIN = frozenset({str, int, float, bool, type(None)})


def to_json(value: Any) -> Any:
    """Convert an object by its own `to_json` method, if any, or by its type; raises TypeError for an unknown type."""
    if type(value) in _PLAIN:
        return value
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
    return {key: to_json(read(value)) for key, read in _readers(names)}


@lru_cache(maxsize=1000)
def _readers(names: tuple[str, ...]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    parts = (name.rpartition("=") for name in names)
    return tuple((key or path.rpartition(".")[2], attrgetter(path)) for key, _, path in parts)


def document(kind: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    """The object that a command prints with --json: `schema` and `kind`, then the keys of the parts."""
    whole: dict[str, Any] = {"schema": SCHEMA, "kind": kind}
    for part in parts:
        whole |= part
    return whole


class JsonKeys(Printed):
    """Printed results whose every key in JSON is also an attribute."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """The object that the command prints with --json."""
        raise NotImplementedError

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self.to_json()})

    # not for type checkers, which would accept any name
    if not TYPE_CHECKING:

        def __getattr__(self, name):
            """Look up a key of `to_json` that the class has neither as a field nor as a property."""
            if not name.startswith("_"):
                values = self.to_json()
                if name in values:
                    return values[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
