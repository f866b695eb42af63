import sys
from pathlib import Path

import pytest

from ligerprof.cli.progress import imported_meanwhile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_module_is_imported_when_the_body_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "imported_ahead.py").write_text("VALUE = 1\n")
    monkeypatch.delitem(sys.modules, "imported_ahead", raising=False)
    before = sys.getswitchinterval()
    with imported_meanwhile("imported_ahead"):
        assert sys.getswitchinterval() < before
    assert sys.modules["imported_ahead"].VALUE == 1
    assert sys.getswitchinterval() == before


def test_an_import_that_fails_leaves_the_error_to_the_next_import(folder: Path) -> None:
    (folder / "fails_ahead.py").write_text("raise ValueError('broken')\n")
    with imported_meanwhile("fails_ahead"):
        pass
    with pytest.raises(ValueError, match="broken"):
        __import__("fails_ahead")


def test_an_error_of_the_body_is_raised_after_the_import() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(OSError, match="unreadable"), imported_meanwhile("json"):
        raise OSError("unreadable")
    assert sys.getswitchinterval() == before
