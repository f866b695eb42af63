"""Which tests `make test` leaves to `make test-long`: measured, and written to long.txt.

    python -m pytest -p tests.durations -n 2 -m "not gpu and not slow"

measures and writes the file. Of each test function, the quickest parameters stay up to a second together,
at least one if it takes under two and a half. Skipped tests keep their place; others that do not run lose it.
Continuous integration runs both commands.
"""

from collections import defaultdict
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("long.txt")
# of all parameters of a function, and of its quickest, on the machine that measures
FUNCTION_SECONDS, QUICKEST_SECONDS = 1.0, 2.5


def listed() -> frozenset[str]:
    """The ids of the tests that take long."""
    return frozenset(FILE.read_text().splitlines())


def long_tests(seconds: dict[str, float]) -> list[str]:
    """The ids of the tests that take long, of measured ones."""
    functions: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for test, took in seconds.items():
        functions[test.split("[")[0]].append((took, test))
    found = []
    for tests in functions.values():
        spent = 0.0
        for number, (took, test) in enumerate(sorted(tests)):
            spent += took
            if spent > (FUNCTION_SECONDS if number else QUICKEST_SECONDS):
                found.append(test)
    return sorted(found)


class Clock:
    """Adds up what each test takes, its fixtures included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.skipped: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.skipped:
            self.skipped.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            measured = {test: took for test, took in self.seconds.items() if test not in self.skipped}
            long = {*long_tests(measured), *listed() & self.skipped}
            FILE.write_text("".join(f"{test}\n" for test in sorted(long)))


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest, which has loaded this module as a plug-in."""
    config.pluginmanager.register(Clock())
