import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ligerprof.errors import ResultFormatError, RunDirectoryError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.sweep.cells import GRIDS, LOCK, SweepFolder

RECIPE = TrainingRecipe(model="tiny").to_json()


def make_row(number: int) -> dict[str, object]:
    row = {"schema": 1, "kind": "cell", "key": f"{number:016x}", "status": "failed", "error": "ünlücky", "seconds": 1.5}
    return {**row, "recipe": RECIPE}


def make_folder(path: Path) -> SweepFolder:
    folder = SweepFolder(path=path)
    folder.make()
    folder.record_grids([])
    return folder


@given(share=st.floats(0, 1), count=st.integers(1, 3))
def test_a_file_cut_anywhere_is_repaired_and_continued(
    tmp_path_factory: pytest.TempPathFactory, share: float, count: int
) -> None:
    folder = make_folder(tmp_path_factory.mktemp("cut"))
    for number in range(count):
        folder.append(make_row(number))
    content = folder.results.read_bytes()
    cut = content[: round(share * len(content))]
    folder.results.write_bytes(cut)
    folder.repair()
    folder.append(make_row(count))
    lines = folder.results.read_bytes().splitlines()
    # whole rows are kept to the byte, including one that lost only its line end
    kept = [line for line in content.splitlines() if cut.startswith(content[: content.index(line) + len(line)])]
    assert lines == [*kept, json.dumps(make_row(count)).encode()]
    assert list(folder.read()) == [json.loads(line)["key"] for line in lines]


def test_the_later_row_of_a_key_counts(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "sweep")
    folder.append(make_row(1))
    folder.append({**make_row(1), "error": "again"})
    assert [cell.error for cell in folder.read().values()] == ["again"]
    assert [row["error"] for row in folder.rows().values()] == ["again"]


@pytest.mark.parametrize("name", ["results.jsonl", LOCK])
def test_a_disk_error_is_one_line(name: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "sweep")
    (folder.path / name).mkdir()

    def begin() -> None:
        with folder.locked():
            folder.repair()
            folder.record_grids([{"options": {}}])

    with pytest.raises(RunDirectoryError, match=re.escape(f"{folder.path / name}: Is a directory")):
        begin()


def test_a_second_sweep_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "sweep")
    with folder.locked(), pytest.raises(RunDirectoryError, match="another sweep"), folder.locked():
        pass
    with folder.locked():
        pass


def test_a_sweep_continues_from_rows_of_another_machine(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps(make_row(1)) + "\n")
    folder = make_folder(tmp_path)
    folder.append(make_row(2))
    assert len(folder.read()) == 2


def test_a_sweep_stopped_before_its_first_file_is_resumed(tmp_path: Path) -> None:
    folder = SweepFolder(path=tmp_path / "sweep")
    folder.make()
    folder.make()
    with folder.locked():
        pass
    assert not (folder.path / GRIDS).exists()
    folder.make()
    (folder.path / LOCK).unlink()
    (folder.runs / "somebody's run").mkdir()
    with pytest.raises(RunDirectoryError, match="not a sweep's folder"):
        folder.make()


def test_grids_add_up(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "sweep")
    for grid in ({"batch": [1]}, {"batch": [2]}, {"batch": [1]}):
        folder.record_grids([grid])
    assert json.loads((folder.path / GRIDS).read_text())["grids"] == [{"batch": [1]}, {"batch": [2]}]


@pytest.mark.parametrize("content", ["", "[]", '{"grids": 3}', "\x00"])
def test_a_file_without_a_list_of_grids_is_refused(content: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "sweep")
    (folder.path / GRIDS).write_text(content)
    with pytest.raises(ResultFormatError, match=r"sweep\.json: not "):
        folder.record_grids([])


def test_a_folder_with_other_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("dear")
    with pytest.raises(RunDirectoryError, match="not a sweep's folder"):
        SweepFolder(path=tmp_path).make()
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]
