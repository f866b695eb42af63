"""Base class of categories: enums whose value is the word in JSON and on the command line; misspelled names."""

from collections.abc import Iterable
from enum import Enum
from typing import TypeVar

WordT = TypeVar("WordT", bound="Word")

# of SequenceMatcher.ratio, 1 for equal texts; difflib.get_close_matches takes the same
_LEAST_LIKENESS = 0.6
# equal last parts are worth less than equal names
_PART_PENALTY = 0.05
_LONGEST_NAME = 200


class Word(str, Enum):
    """A category. A member compares, formats and serializes as its word."""

    # `Enum.__hash__` is a Python function, and it hashes the name, although members equal their words
    __hash__ = str.__hash__

    def __str__(self) -> str:
        """The word on every Python version, unlike `Enum.__str__`."""
        return str(self.value)

    def __repr__(self) -> str:
        """The word in quotes, so that the `repr` of a recipe is valid Python."""
        return repr(self.value)

    @classmethod
    def choices(cls: type[WordT]) -> tuple[WordT, ...]:
        """The members that a user may choose, in the order of help and errors: all but a DEFAULT, for no choice."""
        return tuple(member for member in cls if member.name != "DEFAULT")


class ExplainedWord(Word):
    """A category whose members are declared as `NAME = "word", "meaning"`; tables print the meaning."""

    meaning: str

    def __new__(cls, word: str, meaning: str = "") -> "ExplainedWord":
        """Keep the word as the value."""
        member = str.__new__(cls, word)
        member._value_ = word
        member.meaning = meaning
        return member


def did_you_mean(name: str, known: Iterable[str], *, most: int = 3) -> str:
    """A question that names the known names most like a misspelled one, after a space; empty if there is none."""
    return question(nearest_names(name, known, most=most))


def question(names: Iterable[str]) -> str:
    """Whether the user meant one of these names, after a space; empty for no names."""
    meant = " or ".join(names)
    return f" Did you mean {meant}?" if meant else ""


def nearest_names(name: str, known: Iterable[str], *, most: int = 3) -> tuple[str, ...]:
    """The known names most like a misspelled one, the best first; upper and lower case do not matter.

    Names like `organization/model` are compared whole and by their last part.
    """
    from difflib import SequenceMatcher

    matcher = SequenceMatcher(autojunk=False)

    def likeness(one: str, other: str) -> float:
        matcher.set_seqs(one, other)
        return matcher.ratio() if matcher.quick_ratio() >= _LEAST_LIKENESS else 0.0

    wanted = name[:_LONGEST_NAME].casefold()
    scores = {}
    for each in dict.fromkeys(known):
        candidate = each.casefold()
        score = likeness(wanted, candidate)
        if "/" in wanted or "/" in candidate:
            score = max(score, likeness(wanted.rpartition("/")[2], candidate.rpartition("/")[2]) - _PART_PENALTY)
        if score >= _LEAST_LIKENESS:
            scores[each] = score
    return tuple(sorted(scores, key=lambda each: (-scores[each], each))[:most])
