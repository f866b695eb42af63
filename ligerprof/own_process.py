"""Whether this process is the command line's own: it runs no code of users, and may fork."""

_own = False


def claim() -> None:
    """Say that it is."""
    global _own  # noqa: PLW0603 - a fact about the process
    _own = True


def is_own() -> bool:
    """Whether it is."""
    return _own
