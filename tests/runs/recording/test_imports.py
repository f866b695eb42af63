import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ligerprof.runs.recording.imports import after_import, forget

NAME = "ligerprof_test_module"


@pytest.fixture
def module_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path / f"{NAME}.py"
    sys.modules.pop(NAME, None)


def test_an_action_follows_the_modules_code_once_and_leaves_its_loader(module_file: Path) -> None:
    module_file.write_text("value = 1\n")
    seen: list[int] = []

    def action(module: ModuleType) -> None:
        seen.append(module.value)

    after_import(NAME, action)
    assert seen == []
    module = importlib.import_module(NAME)
    assert seen == [1]
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"
    importlib.reload(module)
    assert seen == [1]


def test_a_module_that_fails_fails_as_before_and_a_withdrawn_action_is_not_called(module_file: Path) -> None:
    module_file.write_text("1 / 0\n")
    seen: list[ModuleType] = []
    after_import(NAME, seen.append)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(NAME)
    forget(NAME, seen.append)
    module_file.write_text("value = 22\n")
    importlib.invalidate_caches()
    assert importlib.import_module(NAME).value == 22
    assert seen == []


def test_a_module_that_does_not_exist_is_missing_as_before() -> None:
    actions: list[ModuleType] = []
    after_import("ligerprof_missing_module", actions.append)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ligerprof_missing_module")
    forget("ligerprof_missing_module", actions.append)
