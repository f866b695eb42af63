"""Read arguments as transformers' HfArgumentParser does: `--key value`, `--flag`, `--no_flag`, `--with-hyphens`."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ligerprof.recipe.commands.shell import OPEN

_NUMBER = re.compile(r"[+-]?(?:\d+|(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?)")
_OPTION = re.compile(r"--?[A-Za-z]")
_TRUTHS = {"true": True, "false": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """The arguments of a program.

    Attributes:
        values: by key, with underscores.
        positional: arguments without a key.
    """

    values: Mapping[str, Any]
    positional: tuple[str, ...]


def read_arguments(words: Sequence[str]) -> Arguments:
    """Group words by their keys; a key without a value is a switch, several values are a list, the last one wins."""
    values: dict[str, Any] = {}
    positional: list[str] = []
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not _OPTION.match(word):
            positional.append(word)
            continue
        key, equals, first = word.lstrip("-").partition("=")
        given = [first] if equals else []
        while not equals and place < len(words) and not _OPTION.match(words[place]) and words[place] != "--":
            # a variable after a value may hold further arguments
            (positional if given and OPEN.fullmatch(words[place]) else given).append(words[place])
            place += 1
        found = [scalar(each) for each in given]
        values[key.replace("-", "_")] = True if not found else found[0] if len(found) == 1 else found
    return Arguments(values=values, positional=tuple(positional))


def negated(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The values with `no_flag` as `flag: false`, where that is the key that is known."""

    def is_negation(key: str) -> bool:
        return key.startswith("no_") and key not in known and key.removeprefix("no_") in known

    return {
        key.removeprefix("no_") if is_negation(key) else key: False if is_negation(key) else value
        for key, value in values.items()
    }


def scalar(text: str) -> Any:
    """A value as a configuration file has it: a number, true, false, null, or the text."""
    if _NUMBER.fullmatch(text) and len(text) < 20:
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    if text == "null":
        return None
    return _TRUTHS.get(text.lower(), text)
