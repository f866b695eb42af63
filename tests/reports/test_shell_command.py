"""Commands as they are printed, against the shell's own reading of them."""

import io
import shlex

from hypothesis import given
from hypothesis import strategies as st

from ligerprof.reports.console import PlainConsole
from ligerprof.reports.terminal import ShellCommand


def words(printed: str) -> list[str]:
    """A shell drops backslashes before line ends, which shlex does not."""
    return shlex.split(printed.replace("\\\n", ""))


OPTIONS = st.lists(st.sampled_from(["--zero 2", "--offload optimizer", "--liger all", "--seq 8192", "--reentrant"]))


@given(options=OPTIONS, width=st.integers(40, 160))
def test_what_is_copied_from_a_terminal_is_the_command(options: list[str], width: int) -> None:
    command = " ".join(["ligerprof estimate", "--model llama3.1-8b", *options])
    console = PlainConsole(file=io.StringIO(), width=width)
    console.print(ShellCommand(f"  {command}"))

    printed = console.file.getvalue()  # type: ignore[attr-defined] - a StringIO
    assert words(printed) == shlex.split(command)
    assert max(map(len, printed.splitlines())) <= width


def test_an_option_wider_than_the_terminal_is_left_whole() -> None:
    command = f"ligerprof estimate --model {'m' * 90} --seq 128"
    console = PlainConsole(file=io.StringIO(), width=60)
    console.print(ShellCommand(command))
    assert words(console.file.getvalue()) == words(command)  # type: ignore[attr-defined]
