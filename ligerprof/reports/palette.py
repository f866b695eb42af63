"""The colors of pages in light and dark: text, surfaces, phases, and the roles, derived from those of the figures."""

import colorsys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ligerprof.reports.figures.style import ROLE_LOOKS
from ligerprof.roles import Phase, Role

# WCAG 2.2 level AA: text against its background, and parts of graphics against what is next to them
TEXT_CONTRAST = 4.5
GRAPHICS_CONTRAST = 3.0
_STEP = 0.02
# lightness (HLS) of black and of white on a dark page: lighter than the card, and none so light that hues are lost
_DARK_LIGHTNESS = (0.38, 0.84)
_DARK_SATURATION = 0.85


@dataclass(frozen=True, kw_only=True, slots=True)
class Theme:
    """The colors of one theme, as CSS hex values.

    Attributes:
        paper: background of the page; card: of charts.
        ink: text and lines; muted: secondary text.
        rule: borders that carry no meaning; control: borders of buttons and fields.
        accent: links, chosen elements and the brush; failure: a failed allocation.
        low_line: the line of the lowest bytes, over the roles.
        mixed: frames of several roles.
        phases: the strip above a timeline.
    """

    name: str
    paper: str
    card: str
    ink: str
    muted: str
    rule: str
    control: str
    accent: str
    failure: str
    low_line: str
    mixed: str
    phases: Mapping[Phase, str]

    def variables(self) -> dict[str, str]:
        plain = ("paper", "card", "ink", "muted", "rule", "control", "accent", "failure", "mixed")
        named = {f"--{name}": getattr(self, name) for name in plain}
        # what a change saves: the stack shows through
        named |= {"--low-line": self.low_line, "--phase-ink": self.ink, "--veil": f"{self.card}c8"}
        named |= {"--accent-ink": text_on(self.accent), "--mixed-ink": text_on(self.mixed)}
        named |= {f"--phase-{phase.value}": color for phase, color in self.phases.items()}
        for role in Role:
            look = role_look(role, self)
            named |= {
                f"--role-{role.value}": look.fill,
                f"--edge-{role.value}": look.edge,
                f"--ink-{role.value}": look.ink,
            }
        return named


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleLook:
    """A role on a page: its area, the line around it, and text on it."""

    fill: str
    edge: str
    ink: str


LIGHT = Theme(
    name="light",
    paper="#f7f8fa",
    card="#ffffff",
    ink="#17202a",
    muted="#55606b",
    rule="#d8dce1",
    control="#7b8591",
    accent="#0b5cad",
    failure="#b3261e",
    low_line="#17202a",
    mixed="#d3d8de",
    phases={
        Phase.BUILD: "#e6e9ed",
        Phase.FORWARD: "#cfe3d8",
        Phase.BACKWARD: "#f3dcc4",
        Phase.OPTIMIZER: "#cfdff2",
        Phase.GENERATION: "#d3eaee",
        Phase.SCORING: "#efe6c8",
        Phase.EVALUATION: "#e2d8ef",
        Phase.SAVING: "#f0d6dd",
        Phase.OUTSIDE: "#eceef1",
    },
)
DARK = Theme(
    name="dark",
    paper="#10151b",
    card="#161c24",
    ink="#e8ecf0",
    muted="#a5b0bc",
    rule="#343d48",
    control="#76828f",
    accent="#79b8ff",
    failure="#ff8a80",
    low_line="#000000",
    mixed="#5d6773",
    phases={
        Phase.BUILD: "#2c343d",
        Phase.FORWARD: "#1f4634",
        Phase.BACKWARD: "#573a1c",
        Phase.OPTIMIZER: "#21405f",
        Phase.GENERATION: "#1d4a52",
        Phase.SCORING: "#4d4520",
        Phase.EVALUATION: "#3d2f58",
        Phase.SAVING: "#55273a",
        Phase.OUTSIDE: "#262d35",
    },
)


def role_look(role: Role, theme: Theme) -> RoleLook:
    """A role's colors: those of the figures, lighter on a dark page; the edge contrasts with the card."""
    fill = ROLE_LOOKS[role].color
    if theme is DARK:
        hue, lightness, saturation = _to_hls(fill)
        darkest, lightest = _DARK_LIGHTNESS
        fill = _from_hls(hue, darkest + (lightest - darkest) * lightness, _DARK_SATURATION * saturation)
        fill = _moved(fill, theme.card, lighter=True)
    edge = _moved(fill, theme.card, lighter=theme is DARK)
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
