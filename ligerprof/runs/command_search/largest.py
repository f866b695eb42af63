"""Choose the trials that find the largest value which fits: between two that are next to each other, one does not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ligerprof.runs.command_search.trials import Outcome, Trial

# the second value whose need is measured, as a multiple of the first
_SECOND = 4
# trials that follow what two others say; then the middle between what fits and what does not
_MOST_GUESSES = 6
# values whose need is the same up to this multiple do not reach the program
_FLAT = 64


class Axis(Protocol):
    """The values of a search in their order, by index."""

    def at(self, index: int) -> float:
        """The value at an index from 0 on."""

    def index(self, value: float) -> int:
        """The index of the largest value that is not above `value`, -1 for none."""


@dataclass(frozen=True)
class Listed:
    """Given values, from the one that needs least on."""

    values: Sequence[object]

    def at(self, index: int) -> float:
        """The value, if all are numbers, else its place."""
        value = self.values[index]
        return float(value) if isinstance(value, (int, float)) and self._are_numbers else index

    def index(self, value: float) -> int:
        """The last place whose value is not above."""
        return sum(self.at(each) <= value for each in range(len(self.values))) - 1

    @property
    def _are_numbers(self) -> bool:
        return all(type(each) in (int, float) for each in self.values) and list(self.values) == sorted(self.values)  # type: ignore[type-var]


@dataclass
class LargestSearch:
    """The state of a search along an axis, whose values need more memory from index to index.

    Attributes:
        start: the index of the command's own value.
        limit_bytes: of reserved memory.
        count: number of values; None: any number.
        known: trials by index and limit, None being no limit; those without one show what a value needs.
    """

    axis: Axis
    start: int
    limit_bytes: int
    count: int | None = None
    known: dict[tuple[int, int | None], Trial] = field(default_factory=dict)

    def fits(self, index: int) -> bool | None:
        """Whether a value fits; None if that is not known. A value with which the program fails does not."""
        limited = self.known.get((index, self.limit_bytes))
        if limited is not None:
            return limited.outcome is Outcome.RAN
        free = self.known.get((index, None))
        # what is allocated without a limit is allocated under one
        return False if free is not None and self._fails_freely(free) else None

    def _fails_freely(self, free: Trial) -> bool:
        return free.outcome is not Outcome.RAN or free.peak_bytes > self.limit_bytes

    @property
    def largest(self) -> int | None:
        """The index of the largest value that is known to fit."""
        return max((index for index, _ in self.known if self.fits(index)), default=None)

    @property
    def failing(self) -> int | None:
        """The index of the smallest value above the largest that fits which is known not to fit."""
        lowest = -1 if self.largest is None else self.largest
        return min((index for index, _ in self.known if index > lowest and self.fits(index) is False), default=None)

    @property
    def answer(self) -> int | None:
        """The index of the largest value that fits, or of the first from which on no more memory is needed."""
        return self.largest if self.plateau is None else self.plateau

    @property
    def is_done(self) -> bool:
        """Whether the answer is known: the next value after the largest that fits does not, or there is none."""
        largest, failing = self.largest, self.failing
        if failing is not None:
            return failing == (0 if largest is None else largest + 1)
        if self.plateau is not None:
            return self.fits(self.plateau) is True
        return largest is not None and largest + 1 == self.count

    @property
    def plateau(self) -> int | None:
        """The first of the values from which on no more memory is needed, as if the program had no more data."""
        ran = sorted((index, trial.peak_bytes) for (index, _), trial in self.known.items() if self._ran(trial))
        if len(ran) < 3 or self.count is not None:
            return None
        last, highest_bytes = ran[-1]
        first = min(index for index, peak_bytes in ran if peak_bytes >= highest_bytes)
        # what is the same for all values, such as the optimizer's peak, hides what few sequences need
        grew = any(peak_bytes < highest_bytes for _, peak_bytes in ran)
        is_flat = first < last and (grew or self.axis.at(last) >= _FLAT * self.axis.at(first))
        return first if is_flat and self.fits(last) else None

    def wanted(self, at_once: int) -> list[tuple[int, int | None]]:
        """The trials to run now, the most useful first: index and limit; none when the answer is known."""
        if self.is_done:
            return []
        if self.failing is None and self.plateau is not None:
            return [(self.plateau, self.limit_bytes)]
        probes = [index for index in self._probes() if self.is_open(index, None)]
        chosen: list[tuple[int, int | None]] = [(index, None) for index in probes]
        if len(probes) < len(self._probes()):
            chosen += [(index, self.limit_bytes) for index in self._around() if index not in probes]
        return chosen[: max(at_once, 1)]

    def is_open(self, index: int, limit_bytes: int | None) -> bool:
        """Whether a trial says what others do not."""
        if limit_bytes is None:
            return (index, None) not in self.known and self.fits(index) is not True
        low, high = self.largest, self.failing
        return (low is None or index > low) and (high is None or index < high)

    def _probes(self) -> tuple[int, ...]:
        second = self.axis.index(_SECOND * self.axis.at(self.start))
        if self.count is not None:
            second = min(second, self.count - 1)
        if second == self.start:
            second = max(self.start - 1, 0)
        return tuple(dict.fromkeys((self.start, second)))

    def _around(self) -> Iterator[int]:
        """Indexes whose verdict is not known between what fits and what does not, those next to the border first."""
        low = -1 if self.largest is None else self.largest
        high = self._end() if self.failing is None else self.failing
        guess = min(max(self._guess(low, high), low), high - 1)
        if self.failing is None and guess == high - 1:
            # further away than what is known reaches
            yield from dict.fromkeys((guess, max((low + high) // 2, low + 1)))
            return
        # the last that fits and the first that does not
        yield from sorted(
            range(max(low + 1, guess - 8), min(high, guess + 10)), key=lambda index: abs(index - guess - 0.5)
        )

    def _end(self) -> int:
        """An index above all that are tried next."""
        if self.count is not None:
            return self.count
        highest = max(index for index, _ in self.known)
        return self.axis.index(_SECOND * self.axis.at(max(highest, 1))) + 2

    def _guess(self, low: int, high: int) -> int:
        """The index of the largest value that probably fits."""
        needs = self._needs()
        limited = sum(limit is not None for _, limit in self.known)
        if limited >= _MOST_GUESSES or not needs or min(each for _, each in needs) <= 0:
            return (low + high) // 2
        if len(needs) == 1:
            # as if all of it were for sequences
            ((only, only_bytes),) = needs
            return self.axis.index(self.axis.at(only) * self.limit_bytes / only_bytes)
        (first, first_bytes), (second, second_bytes) = needs[-2:]
        if second_bytes <= first_bytes:
            return high - 1
        slope = (second_bytes - first_bytes) / (self.axis.at(second) - self.axis.at(first))
        return self.axis.index(self.axis.at(second) + (self.limit_bytes - second_bytes) / slope)

    def _needs(self) -> list[tuple[int, int]]:
        """What values allocate, by index, where it is known."""
        found = {index: trial.peak_bytes for (index, _), trial in self.known.items() if self._ran(trial)}
        return sorted(found.items())

    @staticmethod
    def _ran(trial: Trial) -> bool:
        return trial.outcome is Outcome.RAN and trial.peak_bytes > 0
