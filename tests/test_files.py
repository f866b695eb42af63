"""Files within bounds, and new files whole or not at all."""

import os
import resource
import signal
import stat
from pathlib import Path

import pytest

from ligerprof.errors import OutputError, RecipeError, ResultFormatError
from ligerprof.files import FileKind, parse_json, parse_toml, read_json, read_text, require_absent, write_new_file

KIND = FileKind(error=ResultFormatError, hint="Give a result.", max_bytes=100)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no such file"),
        (b"", "not readable as JSON (Expecting value: line 1 column 1 (char 0))"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"\xff", "not readable as text (it is not UTF-8)"),
        (b" " * 101, "larger than 100 B"),
    ],
)
def test_a_file_without_a_json_object_raises_one_line_of_the_given_error(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "result.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ResultFormatError) as caught:
        read_json(path, KIND)
    assert str(caught.value) == f"{path}: {problem}. Give a result."


def test_a_folder_is_not_readable(tmp_path: Path) -> None:
    with pytest.raises(ResultFormatError, match="not readable"):
        read_text(tmp_path, KIND)


def test_an_endless_device_is_refused() -> None:
    with pytest.raises(ResultFormatError, match="a pipe or device, not a file"):
        read_text(Path("/dev/zero"), KIND)


def test_endless_nesting_is_one_line() -> None:
    with pytest.raises(ResultFormatError, match="deep, line 1: not readable as JSON"):
        parse_json("[" * 100_000, "deep, line 1", KIND)


def test_a_written_file_reads_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    write_new_file(path, '{"peak": "1 MiB \N{MULTIPLICATION SIGN} 2"}')
    assert read_json(path, KIND) == {"peak": "1 MiB \N{MULTIPLICATION SIGN} 2"}
    assert [each.name for each in path.parent.iterdir()] == ["result.json"]


def test_a_file_that_exists_stays_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("mine")
    with pytest.raises(OutputError) as caught:
        write_new_file(path, "yours")
    assert str(caught.value) == f"{path}: exists. Add --force to overwrite it."
    assert path.read_text() == "mine"
    write_new_file(path, b"yours", force=True)
    assert path.read_text() == "yours"
    assert names_in(tmp_path) == ["result.json"]


def test_existing_files_are_refused_before_the_work(tmp_path: Path) -> None:
    free, taken = tmp_path / "free", tmp_path / "taken"
    taken.symlink_to(tmp_path / "nowhere")
    require_absent([free], force=False)
    require_absent([free, taken], force=True)
    with pytest.raises(OutputError, match=r"taken: exists\. Add force=True"):
        require_absent([free, taken], force=False, flag="force=True")


def test_a_failed_write_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "below", tmp_path / "folder"):
        with pytest.raises(OutputError, match="cannot be written"):
            write_new_file(path, "content", force=True)
    assert names_in(tmp_path) == ["file", "folder"]


def test_a_pipe_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(OutputError, match=f"{name}: a pipe or device, not a file"):
            write_new_file(tmp_path / name, "content", force=True)
    assert stat.S_ISFIFO((tmp_path / "link").stat().st_mode)
    assert names_in(tmp_path) == ["link", "pipe"]


def test_a_full_disk_leaves_the_old_file_although_it_is_forced(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old", encoding="utf-8")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a write beyond the limit fails as on a full disk
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OutputError, match="cannot be written"):
            write_new_file(path, "n" * 5000, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_text(encoding="utf-8") == "old"
    assert names_in(tmp_path) == ["page.html"]


def test_nothing_is_overwritten_on_a_file_system_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "result.json"
    write_new_file(path, "first")
    with pytest.raises(OutputError, match="exists"):
        write_new_file(path, "second")
    assert path.read_text() == "first"
    assert names_in(tmp_path) == ["result.json"]


def test_a_new_file_gets_the_default_permissions(tmp_path: Path) -> None:
    write_new_file(tmp_path / "written", "")
    (tmp_path / "plain").touch()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("written", "plain")}
    assert len(modes) == 1


@pytest.mark.parametrize(
    "text",
    [
        "a." * 60_000 + "a = 1",
        '"\\"".' * 20_000 + "a = 1",
        "[" + "'x' . " * 20_000 + "a]",
        "x = {" + "b." * 20_000 + "b=1}",
    ],
    ids=["bare", "quoted", "literal", "inline"],
)
def test_toml_keys_of_thousands_of_parts_are_refused_before_they_take_gigabytes(text: str) -> None:
    kind = FileKind(error=RecipeError, hint="Take another.")
    with pytest.raises(RecipeError, match=r"^x: not readable as TOML \(a key has too many parts\)\. Take another\.$"):
        parse_toml(text, "x", kind)


def test_toml_of_every_other_kind_is_read_or_refused_with_one_line() -> None:
    kind = FileKind(error=RecipeError, hint="Take another.")
    text = '[tool.a."b.c"]\nd.e = "' + "www.example.org and a.b, " * 40 + '"'
    assert list(parse_toml(text, "x", kind)["tool"]["a"]["b.c"]["d"]) == ["e"]
    for wrong in ("a = " + "9" * 5000, "a = " + "[" * 50_000, '"\\' * 10_000, "\x1b[31m = 1"):
        with pytest.raises(RecipeError) as raised:
            parse_toml(wrong, "x", kind)
        assert str(raised.value).isprintable()
