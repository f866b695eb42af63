"""Search with a command: the largest value that fits, and the cheapest changes that make one fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ligerprof.recipe.commands.changes import Change, Lever
from ligerprof.runs.command_search.trials import Outcome, Trial

# the numbers of the levers that are pulled
Plan = tuple[int, ...]


@dataclass
class CheapestSearch:
    """The state of a search over levers, the cheapest first.

    The plan is the shortest beginning of the list that fits, without the levers that it fits without, the most
    expensive ones dropped first. So its most expensive lever is as cheap as any plan's, and none is without effect.

    Attributes:
        known: trials by what they change.
        refused: why a lever makes the program fail, by its number.
    """

    levers: Sequence[Lever]
    known: dict[Change, Trial] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)

    def change(self, plan: Plan) -> Change:
        """What a plan changes."""
        change = Change()
        for number in plan:
            change = change.and_then(self.levers[number].change)
        return change

    def trial(self, plan: Plan) -> Trial | None:
        """The trial of a plan, None before it."""
        return self.known.get(self.change(plan))

    def fits(self, plan: Plan) -> bool | None:
        """Whether a plan fits; None if that is not known."""
        trial = self.trial(plan)
        return None if trial is None else trial.outcome is Outcome.RAN

    def note(self, change: Change, trial: Trial) -> None:
        """Note how a trial has ended; a lever with which the program fails is left out from then on."""
        self.known[change] = trial
        while (culprit := self._culprit()) is not None:
            number, failed = culprit
            self.refused[number] = failed.reason

    def _culprit(self) -> tuple[int, Trial] | None:
        """A lever with which the program fails, and without which it does not."""
        for length in range(1, len(self._usable) + 1):
            trial, before = self.trial(self._beginning(length)), self.trial(self._beginning(length - 1))
            if trial is None or trial.outcome is not Outcome.FAILED or before is None:
                continue
            if before.outcome is not Outcome.FAILED:
                return self._usable[length - 1], trial
        return None

    @property
    def _usable(self) -> Plan:
        return tuple(number for number in range(len(self.levers)) if number not in self.refused)

    def _beginning(self, length: int) -> Plan:
        return self._usable[:length]

    def _bracket(self) -> tuple[int, int]:
        """The longest beginning that is known not to fit, and the shortest longer one that fits or fails otherwise.

        The second is one more than there are levers if none is known.
        """
        ends = [(length, self.trial(self._beginning(length))) for length in range(len(self._usable) + 1)]
        high = min((n for n, each in ends if each is not None and each.outcome is Outcome.RAN), default=len(ends))
        failed = [n for n, each in ends if each is not None and each.outcome is Outcome.FAILED and n < high]
        high = min(failed, default=high)
        low = max((n for n, each in ends if each is not None and n < high), default=-1)
        return low, high

    def _dropped(self) -> Iterator[tuple[Plan, bool | None]]:
        """The plans that are tried once a beginning fits, each with its verdict, up to the first without one.

        After that come those that follow if it does not fit.
        """
        _, high = self._bracket()
        plan = self._beginning(high)
        if len(plan) > 2:
            # if the last lever is enough, all others would be dropped one by one
            alone = self.fits(plan[-1:])
            yield plan[-1:], alone
            if alone:
                return
        for number in reversed(plan[:-1]):
            without = tuple(each for each in plan if each != number)
            verdict = self.fits(without)
            yield without, verdict
            if verdict:
                plan = without

    @property
    def plan(self) -> Plan | None:
        """The cheapest plan that is known to fit; None if none is."""
        _, high = self._bracket()
        if self.fits(self._beginning(high)) is not True:
            return None
        return next((plan for plan, fits in reversed(list(self._dropped())) if fits), self._beginning(high))

    def wanted(self, at_once: int) -> list[Change]:
        """The trials to run now, the most useful first; none when the answer is known."""
        low, high = self._bracket()
        if low + 1 < high:
            lengths = _between(low, high, at_once)
            # what the command does without changes is part of the answer, and comes first
            lengths = (
                lengths if self.trial(()) is not None else [0, *(each for each in lengths if each)][: max(at_once, 1)]
            )
            return list(dict.fromkeys(self.change(self._beginning(each)) for each in lengths))
        if high > len(self._usable) or self.fits(self._beginning(high)) is not True:
            return []
        plans = [plan for plan, fits in self._dropped() if fits is None]
        return list(dict.fromkeys(map(self.change, plans)))[: max(at_once, 1)]

    def is_open(self, change: Change) -> bool:
        """Whether a trial says what others do not."""
        return change in self.wanted(len(self.levers) + 2)


def _between(low: int, high: int, count: int) -> list[int]:
    """At most `count` numbers evenly between two others."""
    inside = range(low + 1, high)
    if len(inside) <= count:
        return list(inside)
    return list(dict.fromkeys(inside[len(inside) * (each + 1) // (count + 1)] for each in range(count)))


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
        are_numbers = all(type(each) in (int, float) for each in self.values)
        in_order = are_numbers and list(self.values) == sorted(self.values)  # type: ignore[type-var]
        return float(value) if isinstance(value, (int, float)) and in_order else index

    def index(self, value: float) -> int:
        """The last place whose value is not above."""
        return sum(self.at(each) <= value for each in range(len(self.values))) - 1


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
        fails = free is not None and (free.outcome is not Outcome.RAN or free.peak_bytes > self.limit_bytes)
        return False if fails else None

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
        # what values allocate, by index, where it is known
        needs = sorted(
            {index: trial.peak_bytes for (index, _), trial in self.known.items() if self._ran(trial)}.items()
        )
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

    @staticmethod
    def _ran(trial: Trial) -> bool:
        return trial.outcome is Outcome.RAN and trial.peak_bytes > 0
