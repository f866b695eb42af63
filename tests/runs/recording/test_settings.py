from pathlib import Path

import pytest

from ligerprof.errors import RecipeError
from ligerprof.runs.recording.settings import Mode, Settings, SimulatedGpu, Steps


@pytest.mark.parametrize(
    ("text", "steps"),
    [("2:4", (2, 4)), ("3", (3, 3)), (":4", (1, 4)), ("5:", (5, None)), (":", (1, None))],
)
def test_steps_are_read(text: str, steps: tuple[int, int | None]) -> None:
    read = Steps.parse(text)

    assert (read.first, read.last) == steps
    assert Steps.parse(str(read)) == read


@pytest.mark.parametrize("text", ["", "0", "4:2", "-1:3", "a", "1:2:3", "1.5", "2-4"])
def test_other_texts_are_not_steps(text: str) -> None:
    with pytest.raises(RecipeError, match="not steps"):
        Steps.parse(text)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(mode=Mode.RUN, output=Path("/some where"), steps=Steps(first=2, last=4)),
        Settings(mode=Mode.RUN, output=Path("/some"), simulated=SimulatedGpu(gpu="h200", limit_bytes=5, eager=True)),
        Settings(mode=Mode.OUT_OF_MEMORY),
    ],
)
def test_settings_pass_through_the_environment(settings: Settings) -> None:
    assert Settings.from_environment(settings.to_environment()) == settings


def test_an_empty_variable_records_nothing_and_an_unknown_one_is_an_error() -> None:
    assert Settings.from_environment({"LIGERPROF": ""}) is None
    for environment, message in (
        ({"LIGERPROF": "everything"}, "LIGERPROF=everything: unknown. Set it to oom"),
        ({"LIGERPROF": "run"}, "only `ligerprof run` sets this"),
    ):
        with pytest.raises(RecipeError, match=message):
            Settings.from_environment(environment)
