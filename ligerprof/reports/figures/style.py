"""The one look of every figure: sizes, colours, hatches, lines and markers, and how a figure becomes a file."""

import io
import math
import textwrap
from collections.abc import Container, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligerprof.errors import RecipeError
from ligerprof.files import write_new_file
from ligerprof.roles import Role

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("style.mplstyle")
FORMATS = ("png", "svg", "pdf")
HALF_PAGE_INCHES = 3.4
INK, RULE, PAPER = "#000000", "#4d4d4d", "#ffffff"
# what fits on one line above a figure of half a page
_TITLE_CHARACTERS = 53
_LINE_INCHES = 0.16
_DIGIT_INCHES = 0.072
# what a legend puts beside its words
_HANDLE_INCHES = 0.47
_GAP_INCHES = 0.06
_LIGHT = 150
# no panel has room for more, whatever a file is called
_LONGEST_NAME = 200
# without dates and versions the same figure is the same file
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": "ligerprof"},
    "pdf": {"CreationDate": None, "Creator": "ligerprof", "Producer": None},
}


@dataclass(frozen=True, slots=True)
class AreaLook:
    """How a bar or an area is filled.

    Attributes:
        hatch: matplotlib's pattern, "" for none; it tells neighbours apart where colours are not seen.
    """

    color: str
    hatch: str = ""

    def arguments(self) -> dict[str, Any]:
        """For Axes.bar, fill_between and their like; hatches take the edge's colour, which the fill must not hide."""
        red, green, blue = (int(self.color[place : place + 2], 16) for place in (1, 3, 5))
        # how bright a screen shows the three primaries (ITU-R BT.601)
        light = 0.299 * red + 0.587 * green + 0.114 * blue > _LIGHT
        edge = RULE if self.hatch and light else PAPER
        return {"facecolor": self.color, "hatch": self.hatch, "edgecolor": edge, "linewidth": 0.5}


@dataclass(frozen=True, slots=True)
class LineLook:
    """How a line is drawn.

    Attributes:
        dashes: matplotlib's line style.
        hollow: whether markers are empty.
        points: size of the markers; those that lie under others are larger and hollow, so that both are seen.
    """

    color: str
    marker: str
    dashes: str | tuple[float, tuple[float, ...]] = "-"
    hollow: bool = False
    points: float = 4.5

    def arguments(self) -> dict[str, Any]:
        """For Axes.plot and its like."""
        return {
            "color": self.color,
            "linestyle": self.dashes,
            "marker": self.marker,
            "markersize": self.points,
            "markerfacecolor": "none" if self.hollow else self.color,
        }


# static bytes are blue, what the forward pass keeps green, the loss's planes orange to brown, workspaces purple; where
# two are as light as each other, or the same to a colour-blind eye, their hatches differ
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
    Role.INPUTS: AreaLook("#54278f", "////"),
    Role.ALLOCATOR_ROUNDING: AreaLook("#bdbdbd", "----"),
    Role.OTHER: AreaLook("#737373", "\\\\\\\\"),
    Role.UNATTRIBUTED: AreaLook("#252525", "xxxx"),
}
POOLED_LOOK = AreaLook("#f2f2f2")


def styled() -> "AbstractContextManager[None]":
    """The style, for as long as a figure is made or written."""
    from matplotlib import rc_context

    return rc_context(fname=STYLE)


def new_figure(height_inches: float, *, width_inches: float = HALF_PAGE_INCHES) -> "Figure":
    """An empty figure of half a page's width; call it, and all that draws, within `styled()`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_inches, height_inches))


def write_title(figure: "Figure", *sentences: str) -> None:
    """What the figure shows, then what it holds for, at the left above the axes, wrapped to its width.

    The figure grows by the lines' height, so that the axes keep theirs.
    """
    characters = int(_TITLE_CHARACTERS * figure.get_figwidth() / HALF_PAGE_INCHES)
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, characters, break_long_words=True)]
    _grow(figure, len(lines))
    figure.suptitle("\n".join(lines), x=0.01, horizontalalignment="left")


def write_legend(figure: "Figure", *, columns: int = 2) -> None:
    """One legend for all axes below them, each label once; the figure grows by its height.

    Args:
        columns: at most; fewer where the words are long.
    """
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        entries |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if not entries:
        return
    labels = list(entries)
    most = range(columns, 1, -1)
    fitting = next((count for count in most if _legend_inches(labels, count) < figure.get_figwidth()), 1)
    _grow(figure, -(-len(labels) // fitting) + 0.5)
    figure.legend([entries[label] for label in labels], labels, loc="outside lower center", ncols=fitting)


def _legend_inches(labels: Sequence[str], columns: int) -> float:
    """How wide a legend is whose columns are filled one after the other, the first ones with one entry more."""
    shortest, longer = divmod(len(labels), columns)
    total, start = 0.0, 0
    for column in range(columns):
        end = start + shortest + (column < longer)
        total += max((_text_inches(label) for label in labels[start:end]), default=0.0) + _HANDLE_INCHES
        start = end
    return total


def shortened(text: str, inches: float) -> str:
    """As much of a name as has room."""
    kept = text[:_LONGEST_NAME]
    while kept and _text_inches(f"{kept}…" if kept != text else kept) > inches:
        kept = kept[:-1]
    return kept if kept == text else f"{kept}…"


def _text_inches(text: str) -> float:
    from matplotlib import rcParams
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), _printable(text), size=rcParams["font.size"]).get_extents().width) / 72


def _grow(figure: "Figure", lines: float) -> None:
    figure.set_figheight(figure.get_figheight() + lines * _LINE_INCHES)


def mark_sizes(axes: "Axes", sizes: Sequence[int], *, width_inches: float, first: Container[int] = ()) -> None:
    """A doubling axis with a tick at each measured size; labels that would touch take a second row, or are left out.

    Args:
        sizes: ascending.
        width_inches: of the axes.
        first: sizes that are labelled before the others.
    """
    inches = width_inches / max(math.log2(sizes[-1]) - math.log2(sizes[0]), 1.0)
    by_weight = sorted(sizes, key=lambda size: (size not in first, size & (size - 1) != 0, size))
    layouts = [_label_rows(order, inches) for order in (sizes, by_weight)]
    rows = max(layouts, key=lambda rows: (sum(size in first for size in rows), len(rows)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, ["\n" * rows[size] + str(size) if size in rows else "" for size in sizes])
    axes.minorticks_off()


def _label_rows(sizes: Iterable[int], inches_a_doubling: float) -> dict[int, int]:
    """The row of each label, 0 or 1, placed one after the other where it touches none; others are left out."""
    taken: tuple[list[tuple[float, float]], ...] = ([], [])
    rows: dict[int, int] = {}
    for size in sizes:
        middle = math.log2(size) * inches_a_doubling
        half = 0.5 * (_DIGIT_INCHES * len(str(size)) + _GAP_INCHES)
        span = middle - half, middle + half
        row = next((row for row, spans in enumerate(taken) if all(_apart(span, other) for other in spans)), None)
        if row is not None:
            taken[row].append(span)
            rows[size] = row
    return rows


def _apart(span: tuple[float, float], other: tuple[float, float]) -> bool:
    return span[1] <= other[0] or other[1] <= span[0]


def check_format(name: str) -> None:
    """Refuse a format that no figure can be written in, before anything is measured.

    Args:
        name: such as `svg`, or a file's suffix.

    Raises:
        RecipeError: the format is unknown.
    """
    if name.removeprefix(".") not in FORMATS:
        shown = f"{name!r}" if name else "a file without suffix"
        raise RecipeError(f"a figure cannot be written as {shown}. Use {', '.join(FORMATS)}.")


def svg_text(figure: "Figure") -> str:
    """The figure as SVG, for pages that hold it."""
    return _rendered(figure, "svg").decode("utf-8")


def write_figure(figure: "Figure", path: Path, *, force: bool) -> None:
    """Write a figure; the file's suffix is its format.

    Raises:
        OutputError: the file exists and `force` is not set, or it cannot be written.
    """
    check_format(path.suffix)
    write_new_file(path, _rendered(figure, path.suffix.removeprefix(".")), force=force)


def _rendered(figure: "Figure", name: str) -> bytes:
    """The figure as a file of a format, without the characters that the format cannot hold."""
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
