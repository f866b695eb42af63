"""The files of a simulated run: a program sees what it wrote, and afterwards everything is as it was."""

import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from ligerprof.errors import UnsupportedError
from ligerprof.simulated_gpu.files import leaving_nothing
from ligerprof.simulated_gpu.values import Values

PROGRAM = Path(__file__).with_name("file_program.py")


def contents(folder: Path) -> dict[str, tuple[int, object]]:
    found: dict[str, tuple[int, object]] = {}
    for path in folder.rglob("*"):
        content = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = path.lstat().st_mode, content
    return found


def test_a_program_has_its_files_and_leaves_none(tmp_path: Path) -> None:
    folder, temporary = tmp_path / "work", tmp_path / "tmp"
    temporary.mkdir()
    files = {
        "metrics.json": "mine",
        "log.txt": "old\n",
        "state.json": "mine",
        "other.txt": "mine",
        "kept/file": "mine",
        "out/checkpoint-1/weights": "1",
        "out/checkpoint-1/more/weights": "1",
        "out/checkpoint-2/weights": "2",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "latest").symlink_to("out/checkpoint-1")
    sqlite3.connect(folder / "old.db").close()
    before = contents(folder)
    done = subprocess.run(
        [sys.executable, "-m", "ligerprof", "run", "--device", "simulated", "--", sys.executable, str(PROGRAM)],
        env={**os.environ, "TMPDIR": str(temporary)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "all files as expected\n"), done.stderr
    # a program without torch has no recording, so that not even the run directory stays
    assert contents(folder) == before
    assert list(temporary.iterdir()) == []


def test_runs_at_the_same_time_leave_each_other_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared, outputs = tmp_path / "out", (tmp_path / "first", tmp_path / "second")
    shared.mkdir()
    first, second = (leaving_nothing(output) for output in outputs)
    first.__enter__()
    second.__enter__()
    for output, made in zip(outputs, ((shared, shared / "a"), (shared / "b",)), strict=True):
        (output / "files").mkdir(parents=True)
        (output / "files/journal").write_text("".join(f'["new", "{path}"]\n' for path in made))
    (shared / "a").touch()
    (shared / "b").touch()
    first.__exit__(None, None, None)
    assert [path.name for path in shared.iterdir()] == ["b"]
    second.__exit__(None, None, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


@pytest.mark.parametrize(
    ("routing", "counts"), [("uniform", [3, 3, 3, 3]), ("worst", [6, 6, 0, 0]), ("6,3,3,0", [6, 3, 3, 0])]
)
def test_tokens_choose_different_experts_by_the_routing(routing: str, counts: list[int]) -> None:
    chosen = Values(lambda _address: 0, routing).experts_of(6, 4, 2)
    assert chosen.flatten().bincount(minlength=4).tolist() == counts
    assert all(len(set(row)) == 2 for row in chosen.tolist())


def test_a_routing_by_layer_follows_the_modules_that_choose() -> None:
    values = Values(lambda _address: 0, "4,0,0,0;0,0,0,4")

    class Router(torch.nn.Module):
        def forward(self) -> int:
            return int(values.experts_of(3, 4, 1)[0, 0])

    first, second, third = Router(), Router(), Router()
    # a checkpointed layer chooses again, in another order
    assert [first(), second(), second(), first()] == [0, 3, 3, 0]
    with pytest.raises(UnsupportedError, match="2 lines"):
        third()
