"""The colors of pages in light and dark: text, surfaces, phases, and the roles, derived from those of the figures."""

import colorsys
from collections.abc import Iterator
from typing import NamedTuple

from ligerprof.reports.figures.style import ROLE_LOOKS
from ligerprof.roles import Phase, Role

# WCAG 2.2 level AA: text against its background, and parts of graphics against what is next to them
TEXT_CONTRAST = 4.5
GRAPHICS_CONTRAST = 3.0
_STEP = 0.02
# lightness (HLS) of black and of white on a dark page: lighter than the card, and none so light that hues are lost
_DARK_LIGHTNESS = (0.38, 0.84)
_DARK_SATURATION = 0.85


# CSS hex values on a light and on a dark page, by the names of variables
_COLORS = {
    # backgrounds of the page and of charts
    "paper": ("#f7f8fa", "#10151b"),
    "card": ("#ffffff", "#161c24"),
    # text and lines, secondary text
    "ink": ("#17202a", "#e8ecf0"),
    "muted": ("#55606b", "#a5b0bc"),
    # borders that carry no meaning, those of buttons and fields
    "rule": ("#d8dce1", "#343d48"),
    "control": ("#7b8591", "#76828f"),
    # links, chosen elements and the brush
    "accent": ("#0b5cad", "#79b8ff"),
    # a failed allocation
    "failure": ("#b3261e", "#ff8a80"),
    # frames of several roles
    "mixed": ("#d3d8de", "#5d6773"),
    # the line of the lowest bytes, over the roles
    "low-line": ("#17202a", "#000000"),
}
# the strip above a timeline
_PHASES = {
    Phase.BUILD: ("#e6e9ed", "#2c343d"),
    Phase.FORWARD: ("#cfe3d8", "#1f4634"),
    Phase.BACKWARD: ("#f3dcc4", "#573a1c"),
    Phase.OPTIMIZER: ("#cfdff2", "#21405f"),
    Phase.GENERATION: ("#d3eaee", "#1d4a52"),
    Phase.SCORING: ("#efe6c8", "#4d4520"),
    Phase.EVALUATION: ("#e2d8ef", "#3d2f58"),
    Phase.SAVING: ("#f0d6dd", "#55273a"),
    Phase.OUTSIDE: ("#eceef1", "#262d35"),
}


class RoleLook(NamedTuple):
    """A role on a page: its area, the line around it, and text on it."""

    fill: str
    edge: str
    ink: str


class Theme:
    """The colors of one theme by their names; `column`: in the tables."""

    def __init__(self, name: str, column: int) -> None:
        self.name = name
        self.phases = {phase: colors[column] for phase, colors in _PHASES.items()}
        self._colors = {color: values[column] for color, values in _COLORS.items()}

    def __getitem__(self, name: str) -> str:
        return self._colors[name]

    def variables(self) -> dict[str, str]:
        named = {f"--{name}": color for name, color in self._colors.items()}
        # what a change saves: the stack shows through
        named |= {"--phase-ink": self["ink"], "--veil": f"{self['card']}c8"}
        named |= {f"--{name}-ink": text_on(self[name]) for name in ("accent", "mixed")}
        named |= {f"--phase-{phase.value}": color for phase, color in self.phases.items()}
        for role in Role:
            look = role_look(role, self)
            named |= zip((f"--{part}-{role.value}" for part in ("role", "edge", "ink")), look, strict=True)
        return named


LIGHT, DARK = Theme("light", 0), Theme("dark", 1)


def role_look(role: Role, theme: Theme) -> RoleLook:
    """A role's colors: those of the figures, lighter on a dark page; the edge contrasts with the card."""
    fill = ROLE_LOOKS[role].color
    if theme is DARK:
        hue, lightness, saturation = _to_hls(fill)
        darkest, lightest = _DARK_LIGHTNESS
        fill = _from_hls(hue, darkest + (lightest - darkest) * lightness, _DARK_SATURATION * saturation)
        fill = _moved(fill, theme["card"], lighter=True)
    edge = _moved(fill, theme["card"], lighter=theme is DARK)
    return RoleLook(fill=fill, edge=edge, ink=text_on(fill))


def text_on(color: str) -> str:
    """Black or white, whichever contrasts more; it is always enough for text."""
    return max(("#000000", "#ffffff"), key=lambda ink: contrast(ink, color))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colors, 1 to 21, as WCAG 2.2 defines it."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def theme_css() -> str:
    """The rules that set the variables: light, dark if the system is, and either if the page says so."""

    def block(selector: str, theme: Theme) -> str:
        body = "".join(f"{name}:{value};" for name, value in theme.variables().items())
        return f"{selector}{{color-scheme:{theme.name};{body}}}"

    dark_system = f"@media (prefers-color-scheme: dark){{{block(':root:not([data-theme=light])', DARK)}}}"
    return "\n".join((block(":root", LIGHT), dark_system, block(":root[data-theme=dark]", DARK)))


def _moved(color: str, background: str, *, lighter: bool) -> str:
    """The color, lighter or darker until it contrasts with a background."""
    hue, lightness, saturation = _to_hls(color)
    while contrast(color, background) < GRAPHICS_CONTRAST and 0 < lightness < 1:
        lightness = min(1.0, max(0.0, lightness + (_STEP if lighter else -_STEP)))
        color = _from_hls(hue, lightness, saturation)
    return color


def _channels(color: str) -> Iterator[float]:
    return (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))


def _luminance(color: str) -> float:
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in _channels(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _to_hls(color: str) -> tuple[float, float, float]:
    red, green, blue = _channels(color)
    return colorsys.rgb_to_hls(red, green, blue)


def _from_hls(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(f"{round(255 * value):02x}" for value in colorsys.hls_to_rgb(hue, lightness, saturation))
