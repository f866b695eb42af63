import json
import pickle
from pathlib import Path

import pytest

from ligerprof.errors import OutputError, RunDirectoryError
from ligerprof.runs.directory import RESULT, create_run_directory, read_result


def test_runs_are_numbered_and_numbers_are_not_used_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "007").mkdir(parents=True)
    (tmp_path / "runs" / "notes").mkdir()
    assert [create_run_directory(None).path.name for _ in range(2)] == ["008", "009"]


def test_a_folder_with_files_is_left_alone_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("kept")
    with pytest.raises(RunDirectoryError, match="--force"):
        create_run_directory(tmp_path)
    create_run_directory(tmp_path, force=True).write_json(RESULT, {"kind": "step"})
    assert (tmp_path / "kept.txt").read_text() == "kept"


def test_a_file_in_the_way_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot create"):
        create_run_directory(tmp_path / "file")


def test_files_are_written_whole_and_read_back(tmp_path: Path) -> None:
    run = create_run_directory(tmp_path / "run")
    run.write_json(RESULT, {"kind": "step", "peak_bytes": 1})
    run.write_snapshot({"segments": [], "device_traces": [[]]})
    assert read_result(run.path) == {"kind": "step", "peak_bytes": 1}
    assert pickle.loads(run.snapshot.read_bytes()) == {"segments": [], "device_traces": [[]]}
    assert sorted(path.name for path in run.path.iterdir()) == ["result.json", "snapshot.pickle"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    run = create_run_directory(tmp_path / "run")
    # a folder of the file's name: the last step of the write fails
    (run.path / RESULT).mkdir()
    with pytest.raises(OutputError, match="cannot be written"):
        run.write_json(RESULT, {})
    assert [path.name for path in run.path.iterdir()] == [RESULT]


def test_only_empty_folders_are_removed(tmp_path: Path) -> None:
    empty, full = create_run_directory(tmp_path / "empty"), create_run_directory(tmp_path / "full")
    full.write_json(RESULT, {})
    empty.remove_if_empty()
    full.remove_if_empty()
    assert not empty.path.exists()
    assert full.path.exists()


@pytest.mark.parametrize("content", ["", "[1]", "{", "\x00", "[" * 100_000])
def test_an_invalid_result_file_is_a_one_line_error(tmp_path: Path, content: str) -> None:
    (tmp_path / RESULT).write_text(content)
    with pytest.raises(RunDirectoryError) as caught:
        read_result(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_result_suggests_a_run_directory(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="ligerprof step"):
        read_result(tmp_path)
    (tmp_path / RESULT).write_text(json.dumps({"kind": "step"}))
    assert read_result(tmp_path)["kind"] == "step"
