"""A rich console for text that comes from files: no markup, no emoji, nothing that a terminal obeys or hides."""

import re
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ligerprof.text import printable

# a blank between a number and its unit, at which no line breaks; a private character, one column wide, replaces it
_BLANK = re.compile(r"(?<=[0-9]) (?=(?:[KMGT]?i?B|%|m?s)(?![\w]))")
_NO_BREAK = "\ue000"
_LEAST_WIDTH = 16


class PlainConsole(Console):
    """Prints every string and every `Text` escaped, wherever it is in a table or a group."""

    def __init__(self, *, file: IO[str], width: int | None = None, **options: Any) -> None:
        super().__init__(file=file, width=width, highlight=False, soft_wrap=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; a table that needs more than the width is not cropped."""
        super().print(*objects, **{"crop": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """Turn a string into a `Text`."""
        return super().render_str(printable(text, keep="\n"), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render a part of the output."""
        if isinstance(renderable, Text) and not renderable.plain.isprintable():
            renderable = _escaped(renderable)
        if not isinstance(renderable, Text) or (options or self.options).max_width < _LEAST_WIDTH:
            return super().render(renderable, options)
        kept = renderable.copy()
        kept.plain = _BLANK.sub(_NO_BREAK, kept.plain)
        rendered = super().render(kept, options)
        return (segment._replace(text=segment.text.replace(_NO_BREAK, " ")) for segment in rendered)


def _escaped(text: Text) -> Text:
    plain = printable(text.plain, keep="\n")
    if plain == text.plain:
        return text
    # the styles of parts are lost, since their places change
    return Text(plain, style=text.style, justify=text.justify, overflow=text.overflow, no_wrap=text.no_wrap)
