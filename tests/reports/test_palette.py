"""Colors of pages meet WCAG 2.2 level AA in both themes."""

import re
from itertools import combinations
from pathlib import Path

import pytest

import ligerprof.reports.page
from ligerprof.reports.palette import (
    DARK,
    GRAPHICS_CONTRAST,
    LIGHT,
    TEXT_CONTRAST,
    Theme,
    contrast,
    role_look,
    theme_css,
)
from ligerprof.roles import Phase, Role

THEMES = pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=0.001)
    assert contrast("#336699", "#336699") == 1


@THEMES
def test_text_can_be_read(theme: Theme) -> None:
    for background in (theme["paper"], theme["card"]):
        for color in (theme["ink"], theme["muted"], theme["failure"], theme["accent"]):
            assert contrast(color, background) >= TEXT_CONTRAST
    variables = theme.variables()
    assert contrast(variables["--accent-ink"], theme["accent"]) >= TEXT_CONTRAST
    assert contrast(variables["--mixed-ink"], theme["mixed"]) >= TEXT_CONTRAST
    for phase in Phase:
        assert contrast(theme["ink"], theme.phases[phase]) >= TEXT_CONTRAST


@THEMES
def test_controls_and_roles_can_be_seen(theme: Theme) -> None:
    for background in (theme["paper"], theme["card"]):
        assert contrast(theme["control"], background) >= GRAPHICS_CONTRAST
    for role in Role:
        look = role_look(role, theme)
        assert contrast(look.edge, theme["card"]) >= GRAPHICS_CONTRAST, role
        assert contrast(look.ink, look.fill) >= TEXT_CONTRAST, role


@THEMES
def test_no_two_roles_look_the_same(theme: Theme) -> None:
    def channels(color: str) -> list[int]:
        return [int(color[place : place + 2], 16) for place in (1, 3, 5)]

    for one, other in combinations(Role, 2):
        fills = channels(role_look(one, theme).fill), channels(role_look(other, theme).fill)
        assert sum(abs(left - right) for left, right in zip(*fills, strict=True)) >= 24, (one, other)


def test_styles_and_scripts_use_only_variables_that_exist() -> None:
    assets = Path(ligerprof.reports.page.__file__).parent / "assets"
    defined = set(re.findall(r"(--[\w-]+):", theme_css()))
    local = {"--fill", "--edge", "--label"}
    for file in [*assets.glob("*.css"), *assets.glob("*.js")]:
        used = set(re.findall(r"var\((--[\w-]+)[,)]", file.read_text(encoding="utf-8")))
        # names that a script completes, such as var(--role-${role})
        assert used - local <= defined, file.name
