"""How a step is run: options that change nothing about what it trains."""

from dataclasses import dataclass

from ligerprof.recipe.categories import Device
from ligerprof.recipe.options import Group, Options, option


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """Where a step runs, and how often. The steady step allocates the same bytes whatever these are."""

    device: Device = option(Group.RUN, "Where the step runs.", default=Device.AUTO)
    warmup: int = option(
        Group.RUN,
        "Steps before the profiled one.",
        default=1,
        default_text="1; 2 with ddp",
        minimum=1,
        requirement="at least 1: the first step is not the steady one",
    )
    repeats: int = option(Group.RUN, "Steps that are timed.", default=10, minimum=1)
