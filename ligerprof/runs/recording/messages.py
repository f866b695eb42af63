"""Messages of a recorded process, which shares its stderr with the program."""

import sys

from ligerprof.text import printable


def say(text: str) -> None:
    """Print one line to stderr, if there is one."""
    if sys.stderr is not None:
        print(f"ligerprof: {printable(text)}", file=sys.stderr, flush=True)  # noqa: T201 - no click in this process
