"""Declare an option: one dataclass field holds its words, range, default, unit, group and help."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from ligerprof.errors import RecipeError
from ligerprof.text import short_repr
from ligerprof.units import parse_bytes, size_text
from ligerprof.words import Word, did_you_mean

_SWITCH_WORDS = {"on": True, "off": False}
_METAVARS = {int: "N", float: "X", str: "TEXT"}
# sums and products of such numbers stay within what floats and 64 bits hold
_INTEGER_LIMIT = 2**53
_KIND_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}


class Group(Word):
    """The headings that help and docs list options under."""

    MODEL = "Model and batch"
    KERNELS = "Fused kernels"
    TRAINING = "Training"
    SEVERAL_GPUS = "Several GPUs and offload"
    MEMORY = "GPU and memory"
    LENGTHS = "The lengths of a data set"
    RUN = "How the step runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of the command line, the recipe and the docs. An option whose default is None may be None.

    Attributes:
        group: the heading it is listed under.
        flag: as typed on the command line; by default derived from the name.
        metavar: placeholder of the value in help; by default derived from `kind`.
        words: the allowed values of a `str`, if they are limited.
        canonical: turns a `str` into the form that a recipe stores; raises RecipeError if it is not allowed.
        is_size: whether an int is a number of bytes, typed as 24GiB.
        below: exclusive upper bound of a number; `minimum` and `maximum` are inclusive.
        requirement: the range in words, if the limits alone do not explain it.
        default_text: the default in words, if it depends on other options.
        negatable: whether a switch that is off by default has a flag to turn it off, as files may turn it on.
        has_commas: whether a value may contain commas, so that commas cannot separate several values.
        name: the field, which is also the JSON key.
        kind: type of the value: int, float, bool, str, or a Word; the first type in the field's annotation.
        also: another type that a recipe accepts unchanged; the second type in the annotation.
    """

    group: Group
    help: str
    flag: str = ""
    metavar: str | None = None
    words: tuple[str, ...] = ()
    canonical: Callable[[Any], str] | None = None
    is_size: bool = False
    minimum: float | None = None
    maximum: float | None = None
    below: float | None = None
    requirement: str | None = None
    default_text: str | None = None
    negatable: bool = False
    has_commas: bool = False
    name: str = ""
    kind: type = str
    also: type | None = None
    default: Any = None

    @property
    def off_flag(self) -> str | None:
        """The flag that turns off a switch that is on by default, or negatable."""
        return self.flag.replace("--", "--no-", 1) if self.default is True or self.negatable else None

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words; empty if other values are allowed, too."""
        words = tuple(self.kind.choices()) if issubclass(self.kind, Word) else self.words
        return () if self.is_size else words

    @property
    def placeholder(self) -> str | None:
        """Placeholder of the value in help; None for a switch."""
        if self.kind is bool:
            return None
        if self.choices:
            return f"[{'|'.join(self.choices)}]"
        return self.metavar or ("SIZE" if self.is_size else _METAVARS[self.kind])

    def check(self, value: Any) -> Any:
        """The value as stored in a recipe, with words as members of their category; raises RecipeError if invalid."""
        if (value is None and self.default is None) or (self.also is not None and isinstance(value, self.also)):
            return self._in_range(value)
        if issubclass(self.kind, Word):
            try:
                return self.kind(value)
            except ValueError:
                raise self._unknown(value) from None
        if type(value) is int and abs(value) >= _INTEGER_LIMIT:
            raise RecipeError(f"{self.name.replace('_', ' ')} is {short_repr(value)}. It must be below 2**53.")
        if self.kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, self.kind) or (isinstance(value, bool) and self.kind is not bool):
            raise RecipeError(f"{self.name} is {short_repr(value)}. It must be {_KIND_NAMES[self.kind]}.")
        if self.words and value not in self.words:
            raise self._unknown(value)
        return self.canonical(value) if self.canonical else self._in_range(value)

    def parse(self, text: str) -> Any:
        """Read a value as typed, with `on` and `off` for a switch; raises RecipeError if invalid."""
        if self.kind is bool:
            if text not in _SWITCH_WORDS:
                raise RecipeError(f"{text!r} is neither on nor off.")
            return _SWITCH_WORDS[text]
        if self.choices and text not in self.choices:
            raise self._unknown(text)
        if self.is_size and not (issubclass(self.kind, Word) and text in tuple(self.kind)):
            return self.check(parse_bytes(text))
        if self.kind in (int, float):
            try:
                return self.check(self.kind(text))
            except ValueError:
                raise RecipeError(f"{text!r} is not {_KIND_NAMES[self.kind]}.") from None
        return self.check(text)

    def typed(self, value: Any) -> tuple[str, ...]:
        """The command-line words that set a value."""
        if self.kind is bool:
            return (self.flag if value else self.off_flag or "",)
        if isinstance(value, Mapping):
            return self.flag, json.dumps(value)
        return (self.flag, size_text(value) if self.is_size and type(value) is int else str(value))

    def _unknown(self, value: object) -> RecipeError:
        words = tuple(self.kind.choices()) if issubclass(self.kind, Word) else self.words
        known = ", ".join(words) + (", or bytes" if self.is_size else "")
        meant = did_you_mean(value, words) if isinstance(value, str) else ""
        return RecipeError(f"unknown {self.name.replace('_', ' ')} {short_repr(value)}.{meant} Known: {known}.")

    def _in_range(self, value: Any) -> Any:
        if isinstance(value, (int, float)) and (
            (self.minimum is not None and not value >= self.minimum)
            or (self.maximum is not None and value > self.maximum)
            or (self.below is not None and value >= self.below)
        ):
            limits = f"at least {self.minimum}" if self.maximum is None else f"from {self.minimum} to {self.maximum}"
            limits += "" if self.below is None else f" and below {self.below}"
            raise RecipeError(f"{self.name.replace('_', ' ')} is {value}. It must be {self.requirement or limits}.")
        return value


def option(group: Group, text: str, *, default: Any = None, **declared: Any) -> Any:
    """Declare an option as a field; `text` is the help, `declared` are other attributes of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(group=group, help=text, **declared)})


@cache
def options_of(cls: "type[Options]") -> Mapping[str, Option]:
    """The options that a class declares, by field, in the order of help and JSON."""
    hints, found = get_type_hints(cls), {}
    for item in dataclasses.fields(cls):
        declared: Option | None = item.metadata.get("option")
        if declared is None:
            continue
        hint = hints[item.name]
        types = [get_origin(each) or each for each in get_args(hint) or (hint,) if each is not NoneType]
        found[item.name] = dataclasses.replace(
            declared,
            name=item.name,
            kind=types[0],
            also=types[1] if len(types) > 1 else None,
            default=item.default,
            flag=declared.flag or f"--{item.name.replace('_', '-')}",
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of classes whose fields are options; checks every value.

    Subclasses have no slots, because a recipe inherits from two of them.
    """

    def __post_init__(self) -> None:
        # mypy assumes that a class is not hashable if its instances may not be
        for name, declared in options_of(type(self)).items():  # type: ignore[arg-type]
            self._settle(name, declared.check(getattr(self, name)))

    def _settle(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
