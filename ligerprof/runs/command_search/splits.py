"""`fit --world N -- COMMAND`: run a command's splits of N GPUs on simulated GPUs, one after another."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ligerprof.recipe.commands.changes import Change
from ligerprof.recipe.commands.splits import Split
from ligerprof.runs.command_search.session import Begin, CommandProblem, Tell, changed_json, run_trials
from ligerprof.runs.command_search.trials import Outcome, Trial
from ligerprof.serialization import document


@dataclass(frozen=True, kw_only=True, slots=True)
class FittingSplits:
    """The result of `ligerprof fit --world N -- COMMAND`.

    Attributes:
        trials: each split whose trial has ended, in the order in which splits are tried.
        is_whole: whether all of them have.
    """

    problem: CommandProblem
    trials: tuple[tuple[Split, Trial], ...]
    is_whole: bool

    @property
    def _first(self) -> tuple[Split, Trial] | None:
        fitting = [item for item in self.trials if item[1].outcome is Outcome.RAN]
        return min(fitting, key=lambda item: item[0].model_ranks, default=None)

    @property
    def change(self) -> Change:
        """What the split changes that fits with the fewest ranks for a model."""
        return self._first[0].change if self._first else Change()

    @property
    def trial(self) -> Trial | None:
        """Its trial."""
        return self._first[1] if self._first else None

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof fit --world N --json -- COMMAND`."""
        world = {"world": self.problem.machine.world}
        return document(
            "splits",
            self.problem.limit_json,
            world | {"splits": [self._entry(split, trial) for split, trial in self.trials]},
        )

    def _entry(self, split: Split, trial: Trial) -> dict[str, Any]:
        fits = None if trial.outcome is Outcome.FAILED else trial.outcome is Outcome.RAN
        own = {"split": split.name, "fits": fits, "ranks": [asdict(rank) for rank in trial.ranks]}
        return own | changed_json(self.problem, split.change, trial)


def fitting_splits(problem: CommandProblem, splits: Sequence[Split], tell: Tell, begin: Begin) -> FittingSplits:
    """Run every split; those that fail do not end the search."""
    known: dict[Change, Trial] = {}
    names = {split.change: split.name for split in splits}

    def note(change: Change, trial: Trial) -> None:
        known[change] = trial
        tell(names[change], trial)

    def wanted() -> list[tuple[Change, int | None]]:
        left = [split.change for split in splits if split.change not in known]
        return [(change, problem.limit.size_bytes) for change in left[: problem.machine.at_once]]

    is_whole = run_trials(problem, note, lambda change: begin(names[change]), wanted)
    trials = tuple((split, known[split.change]) for split in splits if split.change in known)
    return FittingSplits(problem=problem, trials=trials, is_whole=is_whole)
