"""How an option is declared: one dataclass field holds its words, range, default, unit, group and help."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from ligerprof.errors import RecipeError
from ligerprof.units import parse_bytes, size_text
from ligerprof.words import Word

_SWITCH_WORDS = {"on": True, "off": False}
_METAVARS = {int: "N", float: "X", str: "TEXT"}
_KIND_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}


class Group(Word):
    """The headings that help and docs list options under."""

    MODEL = "Model and batch"
    KERNELS = "Fused kernels"
    TRAINING = "Training"
    SEVERAL_GPUS = "Several GPUs and offload"
    MEMORY = "GPU and memory"
    RUN = "How the step runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option, on the command line, in a recipe and in the docs.

    Attributes:
        name: the field, which is also the JSON key.
        kind: type of the value: int, float, bool, str, or a Word; the first type in the field's annotation.
        also: another type that a recipe takes as it is; the second type in the annotation.
        default: the field's. An option whose default is None may be None.
        group: the heading it is listed under.
        help: one sentence.
        flag: as typed on the command line; by default the name.
        metavar: what help shows in place of a value; by default it follows from `kind`.
        words: the known texts of a `str`, if they are limited.
        is_size: an int is a number of bytes, typed as 24GiB.
        minimum: the smallest number.
        maximum: the largest number.
        below: numbers are below this one.
        requirement: the range in words, where the limits alone do not explain it.
        default_text: the default in words, where other options decide it.
        has_commas: a value may hold commas, so that a list of values cannot be separated by them.
    """

    group: Group
    help: str
    flag: str = ""
    metavar: str | None = None
    words: tuple[str, ...] = ()
    is_size: bool = False
    minimum: float | None = None
    maximum: float | None = None
    below: float | None = None
    requirement: str | None = None
    default_text: str | None = None
    has_commas: bool = False
    name: str = ""
    kind: type = str
    also: type | None = None
    default: Any = None

    @property
    def off_flag(self) -> str | None:
        """The flag that switches it off, if it is a switch that is on by default."""
        return self.flag.replace("--", "--no-", 1) if self.default is True else None

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it takes; empty where it takes anything else as well."""
        words = tuple(self.kind.choices()) if issubclass(self.kind, Word) else self.words
        return () if self.is_size else words

    @property
    def placeholder(self) -> str | None:
        """What help shows in place of a value; None for a switch."""
        if self.kind is bool:
            return None
        if self.choices:
            return f"[{'|'.join(self.choices)}]"
        return self.metavar or ("SIZE" if self.is_size else _METAVARS[self.kind])

    def check(self, value: Any) -> Any:
        """The value as the recipe holds it: words become members of their category.

        Raises:
            RecipeError: a value of another type, an unknown word, or a number out of range.
        """
        if (value is None and self.default is None) or (self.also is not None and isinstance(value, self.also)):
            return self._in_range(value)
        if issubclass(self.kind, Word):
            return self._word(value)
        if self.kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, self.kind) or (isinstance(value, bool) and self.kind is not bool):
            raise RecipeError(f"{self.name} is {value!r}. It must be {_KIND_NAMES[self.kind]}.")
        if self.words and value not in self.words:
            raise RecipeError(f"unknown {self.flag[2:]} {value!r}. Known: {', '.join(self.words)}.")
        return self._in_range(value)

    def parse(self, text: str) -> Any:
        """Read a value as it is typed; a switch reads `on` and `off`.

        Raises:
            RecipeError: it cannot be read, or is out of range.
        """
        if self.kind is bool:
            if text not in _SWITCH_WORDS:
                raise RecipeError(f"{text!r} is neither on nor off.")
            return _SWITCH_WORDS[text]
        if self.is_size and not (issubclass(self.kind, Word) and text in tuple(self.kind)):
            return self.check(parse_bytes(text))
        if self.kind in (int, float):
            try:
                return self.check(self.kind(text))
            except ValueError:
                raise RecipeError(f"{text!r} is not {_KIND_NAMES[self.kind]}.") from None
        return self.check(text)

    def typed(self, value: Any) -> tuple[str, ...]:
        """The words on a command line that give it a value."""
        if self.kind is bool:
            return (self.flag if value else self.off_flag or "",)
        return (self.flag, size_text(value) if self.is_size and type(value) is int else str(value))

    def _word(self, value: Any) -> Word:
        kind: type[Word] = self.kind
        try:
            return kind(value)
        except ValueError:
            known = ", ".join(kind.choices()) + (", or bytes" if self.is_size else "")
            raise RecipeError(f"unknown {self.name.replace('_', ' ')} {value!r}. Known: {known}.") from None

    def _in_range(self, value: Any) -> Any:
        if isinstance(value, (int, float)) and (
            (self.minimum is not None and not value >= self.minimum)
            or (self.maximum is not None and value > self.maximum)
            or (self.below is not None and value >= self.below)
        ):
            raise RecipeError(f"{self.name.replace('_', ' ')} is {value}. It is {self._range()}.")
        return value

    def _range(self) -> str:
        if self.requirement is not None:
            return self.requirement
        return f"at least {self.minimum}" if self.maximum is None else f"from {self.minimum} to {self.maximum}"


def option(group: Group, text: str, *, default: Any = None, **declared: Any) -> Any:
    """Declare an option as a field of an `Options` class.

    Args:
        group: the heading it is listed under.
        text: the help, one sentence.
        default: the field's default.
        declared: other attributes of `Option`; name, kind and also come from the field.
    """
    return dataclasses.field(default=default, metadata={"option": Option(group=group, help=text, **declared)})


@cache
def options_of(cls: "type[Options]") -> Mapping[str, Option]:
    """The options that a class declares, by field, in the order of help and JSON."""
    hints = get_type_hints(cls)
    return {
        item.name: _completed(item, hints[item.name]) for item in dataclasses.fields(cls) if "option" in item.metadata
    }


def _completed(item: "dataclasses.Field[Any]", hint: Any) -> Option:
    """The declared option with what follows from its field."""
    declared: Option = item.metadata["option"]
    types = [get_origin(each) or each for each in get_args(hint) or (hint,) if each is not NoneType]
    return dataclasses.replace(
        declared,
        name=item.name,
        kind=types[0],
        also=types[1] if len(types) > 1 else None,
        default=item.default,
        flag=declared.flag or f"--{item.name.replace('_', '-')}",
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of classes whose fields are options: checks every value when an object is made.

    Subclasses have no slots, because a recipe inherits from two of them.
    """

    def __post_init__(self) -> None:
        # mypy takes a class whose instances may lack a hash for one without a hash itself
        for name, declared in options_of(type(self)).items():  # type: ignore[arg-type]
            self._settle(name, declared.check(getattr(self, name)))

    def _settle(self, name: str, value: Any) -> None:
        """Set a field of a frozen object while it is made."""
        object.__setattr__(self, name, value)
