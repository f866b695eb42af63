"""LIGERPROF=oom on a device in place of CUDA."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ligerprof.analyzers.explain.analysis import explain
from ligerprof.runs.recording import out_of_memory
from ligerprof.runs.recording.out_of_memory import OutOfMemoryWatch
from ligerprof.runs.recording.settings import Mode, Settings
from tests.runs.recording.operations import OperationHistory

Commands = list[list[str]]


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Commands:
    """The commands that would explain."""
    commands: Commands = []
    monkeypatch.chdir(tmp_path)

    def run(command: list[str], **_options: Any) -> Any:
        commands.append(command[3:])
        return SimpleNamespace(stdout="explained\n")

    monkeypatch.setattr(out_of_memory.subprocess, "run", run)
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return commands


def watch(history: OperationHistory, output: Path | None = None) -> OutOfMemoryWatch:
    found = OutOfMemoryWatch(Settings(mode=Mode.OUT_OF_MEMORY, output=output), history)
    found.start()
    return found


def fail(history: OperationHistory) -> None:
    """A loop that catches the exception and goes on."""
    history.fails_at = len(history.operations)
    with history, pytest.raises(torch.OutOfMemoryError):
        torch.ones(4)
    with history:
        torch.ones(4)


def test_only_the_history_runs_until_memory_runs_out(explained: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    call, save = torch.nn.Module.__call__, torch.save
    history = OperationHistory()
    watch(history)
    with history:
        torch.ones(4)

    assert history.starts == [{"max_entries": 300_000, "stacks": "python"}]
    assert (torch.nn.Module.__call__, torch.save, history.text) == (call, save, "")
    assert (explained, capsys.readouterr().err, Path("runs").exists()) == ([], "", False)


def test_a_caught_failure_is_written_and_explained_once_and_the_last_one_at_the_end(
    explained: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    history = OperationHistory()
    first = watch(history)
    with history:
        torch.ones(4)
    fail(history)

    assert explained == [["explain", "runs/001"]]
    assert explain(Path("runs/001")).peak_bytes == 2**20
    assert capsys.readouterr().err == "ligerprof: memory ran out; wrote runs/001/snapshot.pickle\nexplained\n"
    size = Path("runs/001/snapshot.pickle").stat().st_size

    for _ in range(9):
        fail(history)
    assert Path("runs/001/snapshot.pickle").stat().st_size > size
    assert capsys.readouterr().err.count("memory ran out again; replaced runs/001/snapshot.pickle") == 4
    assert len(explained) == 1

    first._explain_last()
    first._explain_last()
    assert explained == [["explain", "runs/001"]] * 2


def test_of_several_ranks_one_prints_and_each_writes(
    explained: Commands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        history = OperationHistory()
        watch(history, Path("out"))
        fail(history)

    assert explained == [["explain", "out/rank1"]]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "ligerprof: memory ran out on rank 0 too; wrote out/rank0/snapshot.pickle"
    # a second run overwrites nothing
    monkeypatch.setenv("RANK", "0")
    history = OperationHistory()
    watch(history, Path("out"))
    fail(history)
    assert Path("out/rank0-2/snapshot.pickle").exists()


def test_a_child_of_the_process_writes_nothing(
    explained: Commands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    history = OperationHistory()
    child = watch(history)
    monkeypatch.setattr(out_of_memory.os, "getpid", lambda: -1)
    fail(history)
    child._explain_last()

    assert (explained, capsys.readouterr().err) == ([], "")


def test_a_full_disk_is_one_line(explained: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").write_text("a file")
    history = OperationHistory()
    watch(history)
    fail(history)

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ligerprof: memory ran out, and the snapshot cannot be written: runs: cannot create")
    assert explained == []


def test_the_axolotl_plugin_records_from_the_model_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    base: Any = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {"__init__": lambda self: None, "register": lambda self, cfg: None})
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", base)
    monkeypatch.delitem(sys.modules, "ligerprof.runs.recording.axolotl_plugin", raising=False)
    import ligerprof

    history, cfg = OperationHistory(), SimpleNamespace(output_dir=str(tmp_path))
    plugin = ligerprof.AxolotlPlugin(history)
    with history:
        plugin.pre_model_load(cfg)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        plugin.post_model_load(cfg, model)
        model(torch.ones(2, 4)).sum().backward()
        plugin.post_train(cfg, model)

    assert {stamp.module for stamp in history.stamps_of("addmm")} == {"0"}
    assert explain(tmp_path / "ligerprof" / "process").peak_bytes == 2**20
