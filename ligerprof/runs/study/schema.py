"""Turn the tables of a TOML file into dataclasses, with one-line errors that name the key."""

import dataclasses
import types
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ligerprof.errors import LigerprofError

Built = TypeVar("Built")
_WORDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


class StudyFileError(LigerprofError):
    """A study file that cannot be read, or whose content is invalid."""


def build(kind: type[Built], values: object, key: str) -> Built:
    """An instance of a dataclass from a table.

    Args:
        key: dotted name of the table, for errors.

    Raises:
        StudyFileError: an unknown or missing key, or a value of the wrong type.
    """
    table = _require(dict, values, key, "a table")
    fields = {item.name: item for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := [name for name in table if name not in fields]:
        raise StudyFileError(f"{_join(key, unknown[0])}: unknown key. Known: {', '.join(fields)}.")
    for name, item in fields.items():
        if name not in table and item.default is item.default_factory is dataclasses.MISSING:
            raise StudyFileError(f"{_join(key, name)}: missing.")
    hints = get_type_hints(kind)
    return kind(**{name: convert(hints[name], value, _join(key, name)) for name, value in table.items()})


def convert(hint: Any, value: object, key: str) -> Any:
    """A value as the type that a hint names; nested tables become dataclasses.

    Raises:
        StudyFileError: the value has another type.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    converted = value
    if hasattr(hint, "read"):
        converted = hint.read(value, key)
    elif origin in (Union, types.UnionType):
        converted = _convert_union(arguments, value, key)
    elif origin is tuple:
        found = _require(list, value, key, "a list")
        converted = tuple(convert(arguments[0], item, f"{key}[{number}]") for number, item in enumerate(found))
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        table = _require(dict, value, key, "a table")
        converted = {name: convert(arguments[1], item, _join(key, name)) for name, item in table.items()}
    elif origin is Literal or (isinstance(hint, type) and issubclass(hint, Enum)):
        converted = _convert_word(hint, value, key)
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        converted = build(hint, value, key)
    elif hint is not Any:
        _check_scalar(hint, value, key)
    return converted


def _convert_union(hints: tuple[Any, ...], value: object, key: str) -> Any:
    errors = []
    for hint in hints:
        try:
            return convert(hint, value, key)
        except StudyFileError as error:
            errors.append(error)
    # a table is checked as a table: its own error says more than that it is not a number
    raise errors[-1] if isinstance(value, dict) else errors[0]


def _convert_word(hint: Any, value: object, key: str) -> Any:
    words = get_args(hint) or tuple(item.value for item in hint)
    if value not in words:
        raise StudyFileError(f"{key}: unknown value {value!r:.60}. Known: {', '.join(words)}.")
    return value if get_origin(hint) is Literal else hint(value)


def _check_scalar(hint: Any, value: object, key: str) -> None:
    accepted = (int, float) if hint is float else hint
    if hint not in _WORDS or not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise StudyFileError(f"{key}: {value!r:.60} is not {_WORDS.get(hint, 'allowed here')}.")


def _require(kind: type[Built], value: object, key: str, words: str) -> Built:
    if not isinstance(value, kind):
        raise StudyFileError(f"{key}: {value!r:.60} is not {words}.")
    return value


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
