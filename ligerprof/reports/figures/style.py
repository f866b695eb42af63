"""The common look of figures: sizes, colors, hatches, lines and markers, and how a figure becomes a file."""

import io
import math
import textwrap
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ligerprof.errors import MissingDependencyError, RecipeError
from ligerprof.files import write_new_file
from ligerprof.reports.figures import FORMATS
from ligerprof.roles import Role
from ligerprof.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("style.mplstyle")
HALF_PAGE_INCHES = 3.4
INK, RULE, PAPER = "#000000", "#4d4d4d", "#ffffff"
FAILURE = "#b3261e"
# characters per line above a figure of half a page
_TITLE_CHARACTERS = 53
_LINE_INCHES = 0.16
# width of a legend entry without its label
_HANDLE_INCHES = 0.47
# without dates and versions the same figure is the same file
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": "ligerprof"},
    "pdf": {"CreationDate": None, "Creator": "ligerprof", "Producer": None},
}


@dataclass(frozen=True, slots=True)
class AreaLook:
    """How a bar or an area is filled; matplotlib's hatch distinguishes neighbors without color."""

    color: str
    hatch: str = ""

    def arguments(self) -> dict[str, Any]:
        """Arguments of Axes.bar, fill_between and similar; a hatch takes the edge's color, which must contrast."""
        red, green, blue = (int(self.color[place : place + 2], 16) for place in (1, 3, 5))
        # luma of the three primaries (ITU-R BT.601)
        light = 0.299 * red + 0.587 * green + 0.114 * blue > 150
        edge = RULE if self.hatch and light else PAPER
        return {"facecolor": self.color, "hatch": self.hatch, "edgecolor": edge, "linewidth": 0.5}


@dataclass(frozen=True, slots=True)
class LineLook:
    """How a line is drawn; markers below others are larger and hollow, so that both are visible."""

    color: str
    marker: str
    dashes: str | tuple[float, tuple[float, ...]] = "-"
    hollow: bool = False
    points: float = 4.5

    def arguments(self) -> dict[str, Any]:
        """Arguments of Axes.plot and similar."""
        return {
            "color": self.color,
            "linestyle": self.dashes,
            "marker": self.marker,
            "markersize": self.points,
            "markerfacecolor": "none" if self.hollow else self.color,
        }


# static memory is blue, activations are green, the loss's [T, V] tensors orange to brown, workspaces purple; roles of
# the same lightness, or that color-blind eyes confuse, differ in their hatches
ROLE_LOOKS: dict[Role, AreaLook] = {
    Role.PARAMETERS: AreaLook("#08306b"),
    Role.GRADIENTS: AreaLook("#9ecae1"),
    Role.OPTIMIZER_STATES: AreaLook("#2f7dbb", "////"),
    Role.OPTIMIZER_TEMPORARIES: AreaLook("#deebf7", "////"),
    Role.WEIGHT_CASTS: AreaLook("#00524a", "++++"),
    Role.CHECKPOINTS: AreaLook("#00805e"),
    Role.ACTIVATIONS: AreaLook("#b2e2ce", "+++"),
    Role.ATTENTION_TEMPORARIES: AreaLook("#4f8f7c", "xxxx"),
    Role.LOGITS: AreaLook("#ec7a35"),
    Role.SHIFT_LOGITS: AreaLook("#ffd9a8", "\\\\\\\\"),
    Role.CE_TEMPORARIES: AreaLook("#7a2e04", "----"),
    Role.KERNEL_WORKSPACE: AreaLook("#f0e442", "||||"),
    Role.LIBRARY_WORKSPACE: AreaLook("#a6569d", "||||"),
    Role.COMMUNICATION: AreaLook("#dcc6e4", "xxxx"),
    Role.KV_CACHE: AreaLook("#c9a227", "++++"),
    Role.INPUTS: AreaLook("#54278f", "////"),
    Role.ALLOCATOR_ROUNDING: AreaLook("#bdbdbd", "----"),
    Role.OTHER: AreaLook("#737373", "\\\\\\\\"),
    Role.UNATTRIBUTED: AreaLook("#252525", "xxxx"),
}
POOLED_LOOK = AreaLook("#f2f2f2")


def styled() -> "AbstractContextManager[None]":
    """The style, as a context in which to draw and write figures."""
    from matplotlib import rc_context

    return rc_context(fname=STYLE)


def new_figure(height_inches: float, *, width_inches: float = HALF_PAGE_INCHES) -> "Figure":
    """An empty figure, half a page wide; to be created and drawn within `styled()`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_inches, height_inches))


@contextmanager
def drawing(
    height_inches: float, *sentences: str, width_inches: float = HALF_PAGE_INCHES, columns: int = 2
) -> "Iterator[Figure]":
    """An empty figure to draw on, which then gets a title of `sentences`, if any, and a legend of `columns` at most."""
    with styled():
        figure = new_figure(height_inches, width_inches=width_inches)
        yield figure
        if sentences:
            write_title(figure, *sentences)
        write_legend(figure, columns=columns)


def write_title(figure: "Figure", *sentences: str) -> None:
    """Write a title at the left above the axes, wrapped to the figure's width; the figure grows by its height."""
    characters = int(_TITLE_CHARACTERS * figure.get_figwidth() / HALF_PAGE_INCHES)
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, characters, break_long_words=True)]
    _grow(figure, len(lines))
    figure.suptitle("\n".join(lines), x=0.01, horizontalalignment="left")


def write_legend(figure: "Figure", *, columns: int = 2) -> None:
    """Write one legend for all axes below them, each label once; the figure grows by its height.

    Args:
        columns: the most columns; fewer if the labels are long.
    """
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        entries |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if not entries:
        return
    labels = list(entries)
    counts = range(columns, 1, -1)
    fitting = next((count for count in counts if _legend_inches(labels, count) < figure.get_figwidth()), 1)
    _grow(figure, -(-len(labels) // fitting) + 0.5)
    figure.legend([entries[label] for label in labels], labels, loc="outside lower center", ncols=fitting)


def _legend_inches(labels: Sequence[str], columns: int) -> float:
    """The width of a legend, split into columns as matplotlib splits it."""
    groups = np.array_split(np.array(labels, dtype=object), columns)
    return sum(max(map(_text_inches, group), default=0.0) + _HANDLE_INCHES for group in groups)


def shortened(text: str, inches: float) -> str:
    """A name, cut to a width with an ellipsis."""
    # no panel has room for more
    kept = text[:200]
    while kept and _text_inches(f"{kept}…" if kept != text else kept) > inches:
        kept = kept[:-1]
    return kept if kept == text else f"{kept}…"


def _text_inches(text: str) -> float:
    from matplotlib import rcParams
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), _printable(text), size=rcParams["font.size"]).get_extents().width) / 72


def _grow(figure: "Figure", lines: float) -> None:
    figure.set_figheight(figure.get_figheight() + lines * _LINE_INCHES)


def mark_limit(axes: "Axes", limit_bytes: int, words: str = "") -> float:
    """Draw a memory limit as a horizontal line with its value in the legend; returns GiB."""
    limit = limit_bytes / GIB
    axes.axhline(limit, color=RULE, linewidth=0.9, linestyle=(0, (6, 3)), label=f"limit, {limit:.3g} GiB{words}")
    return limit


def mark_sizes(axes: "Axes", sizes: Sequence[int], *, width_inches: float, first: Container[int] = ()) -> None:
    """Make a doubling axis with a tick at each ascending size, labelled where there is room: those in `first` first."""
    inches = width_inches / max(math.log2(sizes[-1]) - math.log2(sizes[0]), 1.0)
    by_weight = sorted(sizes, key=lambda size: (size not in first, size & (size - 1) != 0, size))
    layouts = [_label_rows(order, inches) for order in (sizes, by_weight)]
    rows = max(layouts, key=lambda rows: (sum(size in first for size in rows), len(rows)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, ["\n" * rows[size] + str(size) if size in rows else "" for size in sizes])
    axes.minorticks_off()


def _label_rows(sizes: Iterable[int], doubling_inches: float) -> dict[int, int]:
    """The row of each label, 0 or 1, placed in order; labels that touch others in both rows are left out."""
    taken: tuple[list[tuple[float, float]], ...] = ([], [])
    rows: dict[int, int] = {}
    for size in sizes:
        middle = math.log2(size) * doubling_inches
        # the width of the digits and a gap
        half = 0.5 * (0.072 * len(str(size)) + 0.06)
        for row, spans in enumerate(taken):
            if all(middle + half <= start or end <= middle - half for start, end in spans):
                spans.append((middle - half, middle + half))
                rows[size] = row
                break
    return rows


def check_format(name: str) -> None:
    """Raise if a figure cannot be drawn in a format, given as `svg` or as a file's suffix.

    Raises:
        RecipeError: the format is unknown.
        MissingDependencyError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MissingDependencyError("figures need matplotlib. Install it with: pip install matplotlib.")
    if name.removeprefix(".") not in FORMATS:
        shown = f"{name!r}" if name else "a file without suffix"
        raise RecipeError(f"a figure cannot be written as {shown}. Use {', '.join(FORMATS)}.")


def svg_text(figure: "Figure") -> str:
    """The figure as SVG, to embed in a page."""
    return _rendered(figure, "svg").decode("utf-8")


def write_figure(figure: "Figure", path: Path, *, force: bool) -> None:
    """Write a figure in the format of the file's suffix; raises OutputError as `write_new_file` does."""
    check_format(path.suffix)
    write_new_file(path, _rendered(figure, path.suffix.removeprefix(".")), force=force)


def _rendered(figure: "Figure", name: str) -> bytes:
    """The figure in a format, with `?` for characters that the format cannot hold."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if text.get_text() != _printable(text.get_text()):
            text.set_text(_printable(text.get_text()))
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format=name, metadata=_METADATA[name])
    return buffer.getvalue()


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
