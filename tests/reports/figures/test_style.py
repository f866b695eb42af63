"""The look: roles and lines are distinct without color and to color-blind eyes."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from ligerprof.errors import OutputError, RecipeError
from ligerprof.reports.figures.curves import _OTHER_LOOKS, _SET_LOOKS
from ligerprof.reports.figures.style import ROLE_LOOKS, check_format, new_figure, styled, write_figure
from ligerprof.roles import Role

# how linear RGB looks to eyes without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1)
EYES = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
# differences of CIE L*a*b* that a reader sees at once, and of lightness that grey print keeps
LEAST_DIFFERENCE, LEAST_LIGHTNESS = 15, 8


def lab(color: str, eye: str = "normal") -> np.ndarray:
    """CIE L*a*b* of an sRGB colour as an eye sees it."""
    srgb = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(EYES[eye]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ seen / np.array([0.9505, 1.0, 1.089])
    root = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


@pytest.mark.parametrize("eye", sorted(EYES))
def test_any_two_roles_differ_to_every_eye_and_in_grey(eye: str) -> None:
    alike = []
    for first, second in itertools.combinations(Role, 2):
        one, other = ROLE_LOOKS[first], ROLE_LOOKS[second]
        difference = lab(one.color, eye) - lab(other.color, eye)
        grey = abs(lab(one.color)[0] - lab(other.color)[0])
        if one.hatch == other.hatch and (np.linalg.norm(difference) < LEAST_DIFFERENCE or grey < LEAST_LIGHTNESS):
            alike.append((first.value, second.value))
    assert alike == []


def test_every_role_has_a_look() -> None:
    assert set(ROLE_LOOKS) == set(Role)


def test_the_measure_knows_black_white_and_what_deutan_eyes_confuse() -> None:
    assert lab("#000000") == pytest.approx([0, 0, 0], abs=0.1)
    assert lab("#ffffff")[0] == pytest.approx(100, abs=0.1)
    red, green = "#b0563c", "#6f7a2e"
    assert np.linalg.norm(lab(red) - lab(green)) > 40
    assert np.linalg.norm(lab(red, "deutan") - lab(green, "deutan")) < 15


def test_any_two_kernel_sets_differ_in_marker_and_line() -> None:
    looks = [*_SET_LOOKS.values(), *_OTHER_LOOKS]
    assert len({look.marker for look in looks}) == len({look.dashes for look in looks}) == len(looks)


@pytest.mark.parametrize("name", ["", ".gif", "jpeg"])
def test_an_unknown_format_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(RecipeError, match="a figure cannot be written as"):
        check_format(name)


def test_a_figure_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "taken.png").mkdir()
    with styled():
        figure = new_figure(1.0)
    with pytest.raises(OutputError, match=r"taken\.png: cannot be written"):
        write_figure(figure, tmp_path / "taken.png", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["taken.png"]
