"""Choose the trials that find the cheapest changes with which a command fits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ligerprof.recipe.commands.changes import Change
from ligerprof.recipe.commands.levers import Lever
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
