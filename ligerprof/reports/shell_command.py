"""Shell commands in reports: what is copied from the terminal runs, however wide the terminal is."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_CONTINUED = " \\"


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A command after an indent or a word, continued with backslashes between options where it is too wide."""

    text: str

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Lines that rich does not wrap; a single option that is too wide is left to the terminal."""
        from rich.text import Text

        yield Text(wrap_command(self.text, options.max_width), no_wrap=True, overflow="ignore")


def wrap_command(text: str, width: int) -> str:
    """Wrap a command of more than `width` columns between its options, with the shell's line continuation."""
    lines = [""]
    for part in re.split(r" (?=--)", text):
        if lines[-1] and len(lines[-1]) + 1 + len(part) + len(_CONTINUED) > width:
            lines[-1] += _CONTINUED
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    return "\n".join(lines)
