"""Find this process's rank, and merge the outcomes of all ranks."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass

from ligerprof.errors import RecipeError
from ligerprof.runs.outcome import StepOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One process of a group that a launcher such as torchrun started; `local` is the index of its GPU."""

    rank: int
    world_size: int
    local: int


def rank_from_environment(environment: Mapping[str, str] | None = None) -> Rank | None:
    """Read the variables that torchrun, DeepSpeed's launcher and others set; None without a launcher.

    Raises:
        RecipeError: a variable is missing or not a number.
    """
    variables = os.environ if environment is None else environment
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        return None
    required = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in required if name not in variables]:
        raise RecipeError(f"RANK and WORLD_SIZE go with {', '.join(missing)}, which the environment lacks.")
    try:
        rank, world_size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        return Rank(rank=rank, world_size=world_size, local=int(variables.get("LOCAL_RANK", "0")))
    except ValueError as error:
        raise RecipeError(
            f"RANK, WORLD_SIZE and LOCAL_RANK are numbers ({error}). Unset them, or use torchrun."
        ) from None


def merge_ranks(outcomes: Mapping[int, StepOutcome]) -> StepOutcome:
    """The outcome of the worst rank, with those of all ranks in `ranks`, the worst first.

    The worst rank is one that ran out of memory, else the one with the highest peak. The slowest rank gives the
    time of each step.
    """
    worst_first = sorted(outcomes, key=lambda rank: (outcomes[rank].oom is None, -outcomes[rank].peak_bytes, rank))
    worst = worst_first[0]
    timings = [outcome.step_seconds for outcome in outcomes.values() if outcome.step_seconds]
    notes = dict.fromkeys(note for outcome in outcomes.values() for note in outcome.notes)
    return dataclasses.replace(
        outcomes[worst],
        step_seconds=tuple(max(seconds) for seconds in zip(*timings, strict=False)),
        notes=(_worst_note(worst, outcomes), *notes),
        ranks={rank: outcomes[rank] for rank in worst_first},
    )


def _worst_note(worst: int, outcomes: Mapping[int, StepOutcome]) -> str:
    if outcomes[worst].oom is not None:
        return f"rank {worst} ran out of memory; the peak, the roles and the phases are its own"
    return f"the peak, the roles and the phases are rank {worst}'s, the highest of {len(outcomes)}"
