"""Cases of which `make test` runs a part, and `make test-slow` the rest."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def sampled(names: str | Sequence[str], cases: Iterable[Any], *, every: int, **more: Any) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize`, where all but one in so many cases are slow."""
    single = len(names.split(",") if isinstance(names, str) else names) == 1
    params = []
    for number, case in enumerate(cases):
        known = isinstance(case, type(pytest.param()))
        values = case.values if known else (case,) if single else case
        marks = [*(case.marks if known else ()), *([pytest.mark.slow] if number % every else [])]
        params.append(pytest.param(*values, marks=marks, id=case.id if known else None))
    return pytest.mark.parametrize(names, params, **more)
