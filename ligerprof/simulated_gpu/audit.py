"""The one audit hook of a simulated run: Python calls every hook for every event, also for each `id`."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

_checks: dict[str, Callable[..., None]] = {}


def watch(checks: Mapping[str, Callable[..., None]]) -> None:
    """Call a function with the arguments of an event from now on; the events are listed in Python's documentation."""
    if not _checks:
        sys.addaudithook(_call)
    _checks.update(checks)


def _call(event: str, arguments: tuple[Any, ...]) -> None:
    check = _checks.get(event)
    if check is not None:
        check(*arguments)
