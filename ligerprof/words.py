"""Base class of categories: enums whose value is the word in JSON and on the command line."""

from enum import Enum
from typing import TypeVar

WordT = TypeVar("WordT", bound="Word")


class Word(str, Enum):
    """A category. A member compares, formats and serializes as its word."""

    def __str__(self) -> str:
        """The word on every Python version, unlike `Enum.__str__`."""
        return str(self.value)

    def __repr__(self) -> str:
        """The word in quotes, so that the `repr` of a recipe is valid Python."""
        return repr(self.value)

    @classmethod
    def choices(cls: type[WordT]) -> tuple[WordT, ...]:
        """The members that a user may choose, in the order of help and errors."""
        return tuple(cls)


class ExplainedWord(Word):
    """A category whose members are declared as `NAME = "word", "meaning"`; tables print the meaning."""

    meaning: str

    def __new__(cls, word: str, meaning: str = "") -> "ExplainedWord":
        """Keep the word as the value."""
        member = str.__new__(cls, word)
        member._value_ = word
        member.meaning = meaning
        return member
