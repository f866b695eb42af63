"""Base class of categories: enums whose value is the word in the JSON and on the command line."""

from enum import Enum
from typing import TypeVar

from ligerprof.errors import RecipeError

WordT = TypeVar("WordT", bound="Word")


class Word(str, Enum):
    """A category. Members format, compare, serialize and show themselves as their word."""

    def __str__(self) -> str:
        """The word, on every Python version."""
        return str(self.value)

    def __repr__(self) -> str:
        """The word in quotes: what `repr` of a recipe shows can be typed again."""
        return repr(self.value)

    @classmethod
    def choices(cls: type[WordT]) -> tuple[WordT, ...]:
        """The members that a user may give, in the order that help and errors list them."""
        return tuple(cls)

    @classmethod
    def parse(cls: type[WordT], value: object, name: str) -> WordT:
        """Turn a word into its member.

        Args:
            name: the option that errors name.

        Raises:
            RecipeError: an unknown word; lists the known ones.
        """
        try:
            return cls(value)
        except ValueError:
            raise RecipeError(f"unknown {name} {value!r}. Known: {', '.join(cls.choices())}.") from None


class ExplainedWord(Word):
    """A category whose members are declared as `NAME = "word", "meaning"`; tables print the meaning."""

    meaning: str

    def __new__(cls, word: str, meaning: str) -> "ExplainedWord":
        """Keep the word as the value."""
        member = str.__new__(cls, word)
        member._value_ = word
        member.meaning = meaning
        return member
