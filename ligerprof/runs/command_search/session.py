"""Search with simulated runs of a command: the largest value that fits, or the cheapest changes with which it fits."""

import importlib.util
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

from ligerprof.errors import LigerprofError
from ligerprof.recipe.commands.changes import Batches, Change, ChangedCommand, Lever, TrainingCommand, find_levers
from ligerprof.recipe.commands.shell import scalar
from ligerprof.recipe.usable_memory import Limit
from ligerprof.runs.command_search.largest import CheapestSearch, LargestSearch, Listed, Plan
from ligerprof.runs.command_search.trials import Machine, Outcome, Trial, Trials
from ligerprof.serialization import document, select
from ligerprof.words import Word

# receives a trial that has ended, with what it varied
Tell = Callable[[str, Trial], None]
# receives what begins
Begin = Callable[[str], None]
_LONGEST_LINE = 400


class Bound(Word):
    """What limits an answer: memory, the given values, or the program, which fails with larger ones or ignores them."""

    MEMORY = "memory"
    VALUES = "values"
    PROGRAM = "program"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandProblem:
    """What is searched for: a command, and the limit that it is to fit.

    Attributes:
        copies: where each file that changes is to be written; None: arguments change where they can.
    """

    command: TrainingCommand
    limit: Limit
    machine: Machine
    copies: Mapping[Path, Path] | None = None

    def changed(self, change: Change, folder: Path | None = None) -> ChangedCommand:
        """The command after a change, with changed files in `folder`, or where the user wants them."""
        wanted = self.copies or {}
        copies = {
            file: wanted.get(file, file.with_name(f"{file.stem}-fits{file.suffix}")) for file in self.command.files
        }
        if folder is not None:
            copies = {file: folder / copy.name for file, copy in copies.items()}
        return self.command.changed(change, copies, in_files=self.copies is not None)

    @property
    def limit_json(self) -> dict[str, Any]:
        """The first keys of results."""
        return select(self, "limit_bytes=limit.size_bytes", "limit_source=limit.source", "command=command.words")


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestFit:
    """The result of `ligerprof fit -- COMMAND`.

    Attributes:
        key: the argument or key that is varied.
        own: the command's own value, None if it states none.
        own_fits: whether the command fits as it is; None if that is not known.
        value: the largest value that fits; None if none is known to.
        next_value: the next larger one, which does not fit; None if there is none, or it is not known.
        bounded_by: what the next value exceeds; None if the search was ended.
        trials: all, in the order of their ends, each with its value.
    """

    problem: CommandProblem
    key: str
    own: Any
    own_fits: bool | None
    value: Any
    next_value: Any
    bounded_by: Bound | None
    trial: Trial | None
    change: Change
    trials: tuple[tuple[Any, Trial], ...]

    @property
    def is_whole(self) -> bool:
        """Whether the search came to its end."""
        return self.bounded_by is not None

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof fit --json -- COMMAND`."""
        return document(
            "fit",
            self.problem.limit_json,
            {
                "key": self.key,
                "wanted": {"value": self.own, **_verdict(self.own_fits)},
                "value": self.value,
                "next_value": self.next_value,
                "bounded_by": self.bounded_by,
                "changes": dict(self.change.keys),
                "plan": _plan_json(self.problem, self.change, self.trial),
                "trials": [{"value": value, **trial_json(trial)} for value, trial in self.trials],
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheapestFit:
    """The result of `ligerprof advise -- COMMAND`.

    Attributes:
        own: the trial of the command as it is; None if it did not end.
        plan: the levers with which it fits, the cheapest first; None if none are known.
        refused: levers that cannot be pulled, each with the reason.
        is_whole: whether the search came to its end.
        trials: all, in the order of their ends, each with the names of its levers.
    """

    problem: CommandProblem
    own: Trial | None
    plan: tuple[Lever, ...] | None
    change: Change
    trial: Trial | None
    refused: tuple[tuple[Lever, str], ...]
    left: tuple[Lever, ...]
    is_whole: bool
    trials: tuple[tuple[str, Trial], ...]

    def to_json(self) -> dict[str, Any]:
        """The object of `ligerprof advise --json -- COMMAND`."""
        own_fits = None if self.own is None else self.own.outcome is Outcome.RAN
        state = [("applied", each, "") for each in self.plan or ()] + [("spare", each, "") for each in self.left]
        state += [("inapplicable", lever, reason) for lever, reason in self.refused]
        return document(
            "advise",
            self.problem.limit_json,
            {
                **_verdict(own_fits),
                "steps": [
                    {"name": lever.name, "state": word, "cost": lever.cost, "reason": reason or None}
                    for word, lever, reason in state
                ],
                "changes": dict(self.change.keys),
                "plan": _plan_json(self.problem, self.change, self.trial),
                "trials": [{"changes": name, **trial_json(trial)} for name, trial in self.trials],
            },
        )


def _verdict(fits: bool | None) -> dict[str, Any]:
    return {"fits": fits, "verdict": {True: "fits", False: "does not fit", None: None}[fits]}


def _command_json(changed: ChangedCommand) -> dict[str, Any]:
    files = [str(path) for path in changed.files]
    return {"command": list(changed.words), "environment": dict(changed.environment), "files": files}


def _plan_json(problem: CommandProblem, change: Change, trial: Trial | None) -> dict[str, Any] | None:
    if trial is None:
        return None
    held = select(trial, "peak_bytes", "reserved_bytes")
    return {**_command_json(problem.changed(change)), **_verdict(fits=True), **held}


def changed_json(problem: CommandProblem, change: Change, trial: Trial) -> dict[str, Any]:
    """The keys of a changed command and its trial."""
    return {"changes": dict(change.keys), **_command_json(problem.changed(change)), **trial_json(trial)}


def trial_json(trial: Trial) -> dict[str, Any]:
    """The keys of a trial in the JSON."""
    ran = trial.outcome is Outcome.RAN
    return {
        **select(trial, "limit_bytes", "outcome", "steps"),
        "peak_bytes": trial.peak_bytes if ran else None,
        "reserved_bytes": trial.reserved_bytes if ran else None,
        "seconds": round(trial.seconds, 1),
        "reason": trial.reason or None,
    }


def largest_batch(problem: CommandProblem, batches: Batches, tell: Tell, begin: Begin) -> LargestFit:
    """The largest micro-batch that fits, the sequences of an optimizer step kept where that is possible.

    Raises:
        LigerprofError: the command fails with its own batch for another reason than memory.
    """

    def name(batch: int) -> str:
        if batches.accumulation_key is None or batches.accumulated(batch) == 1:
            return f"{batches.key} {batch}"
        return f"{batches.key} {batch}, {batches.accumulation_key} {batches.accumulated(batch)}"

    search = LargestSearch(
        axis=batches, start=batches.index(batches.batch), limit_bytes=problem.limit.size_bytes, count=None
    )
    return _largest(problem, search, batches.key, batches.batch, (batches.at, batches.change, name), (tell, begin))


def largest_value(problem: CommandProblem, key: str, values: Sequence[Any], tell: Tell, begin: Begin) -> LargestFit:
    """The last of the given values that fits; they are ordered by what they need.

    Raises:
        LigerprofError: the command fails with the first value for another reason than memory.
    """
    own = problem.command.value(key)
    start = values.index(own) if own in values else 0
    search = LargestSearch(axis=Listed(values), start=start, limit_bytes=problem.limit.size_bytes, count=len(values))
    functions = (values.__getitem__, lambda value: Change(keys={key: value}), lambda value: f"{key} {value}")
    return _largest(problem, search, key, own, functions, (tell, begin))


def _largest(
    problem: CommandProblem,
    search: LargestSearch,
    key: str,
    own: Any,
    functions: tuple[Callable[[int], Any], Callable[[Any], Change], Callable[[Any], str]],
    listeners: tuple[Tell, Begin],
) -> LargestFit:
    (at, change_to, name), (tell, begin) = functions, listeners
    told: list[tuple[Any, Trial]] = []

    def note(index: int, trial: Trial) -> None:
        search.known[index, trial.limit_bytes] = trial
        told.append((at(index), trial))
        tell(name(at(index)), trial)
        if trial.outcome is Outcome.FAILED and index == search.start:
            raise _failed(trial)

    with _trials(
        problem,
        command=lambda index, folder: problem.changed(change_to(at(index)), folder),
        note=note,
        begin=lambda index: begin(name(at(index))),
    ) as trials:
        _search(trials, lambda: search.wanted(problem.machine.at_once), search.is_open)
    largest, failing = search.answer, search.failing
    bound, limit_bytes = None, problem.limit.size_bytes
    refused = None if failing is None else search.known.get((failing, limit_bytes))
    if search.is_done:
        by_memory = failing is not None and (refused is None or refused.outcome is not Outcome.FAILED)
        bound = Bound.MEMORY if by_memory else Bound.VALUES if failing is None and search.count else Bound.PROGRAM
    return LargestFit(
        problem=problem,
        key=key,
        own=own,
        own_fits=None if own is None else _fits_as_it_is(search, largest),
        value=None if largest is None else at(largest),
        next_value=None if failing is None else at(failing),
        bounded_by=bound,
        trial=None if largest is None else search.known.get((largest, limit_bytes)),
        change=Change() if largest is None else change_to(at(largest)),
        trials=tuple(told),
    )


def _fits_as_it_is(search: LargestSearch, largest: int | None) -> bool | None:
    known = search.fits(search.start)
    # what needs less than an answer fits
    return True if known is None and largest is not None and search.start <= largest else known


def cheapest_changes(problem: CommandProblem, levers: Sequence[Lever], tell: Tell, begin: Begin) -> CheapestFit:
    """The cheapest changes with which a command fits, see CheapestSearch.

    Raises:
        LigerprofError: the command fails as it is for another reason than memory.
    """
    packages = {lever.package for lever in levers if lever.package}
    missing = {package for package in packages if not _is_installed(_python_of(problem.command), package)}
    usable = [lever for lever in levers if lever.package not in missing]
    search, told = CheapestSearch(levers=usable), []

    def note(change: Change, trial: Trial) -> None:
        search.note(change, trial)
        told.append((named(change), trial))
        tell(named(change), trial)
        require_own(change, trial)

    is_whole = run_trials(
        problem,
        note,
        lambda change: begin(named(change)),
        lambda: [(each, problem.limit.size_bytes) for each in search.wanted(problem.machine.at_once)],
        lambda change, _limit_bytes: search.is_open(change),
    )
    plan: Plan | None = search.plan
    refused = [(usable[number], reason) for number, reason in search.refused.items()]
    refused += [(lever, f"{lever.package} is not installed") for lever in levers if lever.package in missing]
    refused_levers = [lever for lever, _ in refused]
    pulled = [usable[number] for number in plan or ()]
    return CheapestFit(
        problem=problem,
        own=search.trial(()),
        plan=None if plan is None else tuple(pulled),
        change=Change() if plan is None else search.change(plan),
        trial=None if plan is None else search.trial(plan),
        refused=tuple(refused),
        left=tuple(lever for lever in levers if lever not in (*pulled, *refused_levers)),
        is_whole=is_whole,
        trials=tuple(told),
    )


def named(change: Change) -> str:
    """A change in words."""
    pulled = [f"{key} {value}" for key, value in change.keys.items()]
    return ", ".join([*pulled, *(f"{key}={value}" for key, value in change.environment.items())]) or "unchanged"


def run_trials(
    problem: CommandProblem,
    note: Callable[[Change, Trial], None],
    begin: Callable[[Change], None],
    wanted: Callable[[], Sequence[tuple[Change, int | None]]],
    is_open: Callable[[Change, int | None], bool] = lambda _change, _limit_bytes: True,
) -> bool:
    """Run the trials that are wanted; returns whether the search came to its end."""
    with _trials(problem, command=problem.changed, note=note, begin=begin) as trials:
        return _search(trials, wanted, is_open)


def run_again(problem: CommandProblem, typed: ChangedCommand, begin: Begin) -> Trial:
    """Run a command once more as it is typed, with the files that were written."""
    found: list[Trial] = []
    with _trials(
        replace(problem, machine=replace(problem.machine, branches=False)),
        command=lambda _key, _folder: replace(typed, files={}),
        note=lambda _key, trial: found.append(trial),
        begin=lambda _key: begin("the command once more, as it is typed"),
    ) as trials:
        trials.advance([(None, problem.limit.size_bytes)])
    return found[-1]


def _search(
    trials: Trials, wanted: Callable[[], Sequence[tuple[Any, int | None]]], is_open: Callable[[Any, int | None], bool]
) -> bool:
    """Run trials until no more are wanted; returns whether that was so, rather than that Ctrl-C ended the search."""
    try:
        while chosen := wanted():
            trials.advance(chosen, is_open)
    except KeyboardInterrupt:
        return False
    return True


@contextmanager
def _trials(
    problem: CommandProblem,
    command: Callable[[Any, Path], ChangedCommand],
    note: Callable[[Any, Trial], None],
    begin: Callable[[Any], None],
) -> Iterator[Trials]:
    """Trials in a folder that goes with them."""
    with TemporaryDirectory(prefix="ligerprof-search-", ignore_cleanup_errors=True) as folder:
        machine = replace(problem.machine, folder=Path(folder))
        trials = Trials(machine, command, note, begin)
        with _ended_by_signals():
            try:
                yield trials
            finally:
                trials.stop()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process as an exception does, so that no trial is left."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    watched = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    before = {number: signal.signal(number, end) for number in watched}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failed(trial: Trial) -> LigerprofError:
    return LigerprofError(f"the command fails on the simulated GPU: {trial.reason}. Run it with ligerprof run first.")


def require_own(change: Change, trial: Trial) -> None:
    """Raise if the trial of the command as it is failed for another reason than memory."""
    if trial.outcome is Outcome.FAILED and change == Change():
        raise _failed(trial)


def read_vary(text: str) -> tuple[str, tuple[Any, ...]]:
    """Read `KEY=V1,V2,…`; raises ValueError without a key or a value."""
    key, equals, values = text.partition("=")
    found = tuple(scalar(value.strip()) for value in values.split(",") if value.strip())
    if not key.strip("- ") or not equals or not found:
        raise ValueError(f"{text!r}: not KEY=V1,V2,…, such as batch=1,2,4,8.")
    return key.strip("- ").replace("-", "_"), found


def levers_of(command: TrainingCommand, varied: Sequence[tuple[str, tuple[Any, ...]]]) -> tuple[Lever, ...]:
    """The levers of a command, after those that the user named."""
    own = [
        Lever(name=f"{key} {value}", cost="yours to judge", change=Change(keys={key: value}))
        for key, values in varied
        for value in values
        if value != command.value(key)
    ]
    named = {key for key, _ in varied}
    return (*own, *(lever for lever in find_levers(command) if named.isdisjoint(lever.change.keys)))


def _python_of(command: TrainingCommand) -> str | None:
    """The Python that runs a command: its first word, or that of the script that this is; None if it is not known."""
    first = command.words[0]
    if PurePath(first).name.startswith("python"):
        return first
    found = shutil.which(first)
    if found is None:
        return None
    with Path(found).open("rb") as script:
        line = script.readline(_LONGEST_LINE).decode(errors="replace").strip()
    return line[2:].strip() if line.startswith("#!") and "python" in line and " " not in line[2:].strip() else None


@lru_cache
def _is_installed(python: str | None, package: str) -> bool:
    if python is None or python == sys.executable:
        return importlib.util.find_spec(package) is not None
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0
    except OSError:
        return True
