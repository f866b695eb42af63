"""Trials branch off where a command reads its arguments."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ligerprof.runs.command_search.trunk import Trunk, can_branch
from ligerprof.runs.recording.branches import arguments_of
from ligerprof.runs.recording.launch import environment_of
from ligerprof.runs.recording.settings import Mode, Settings, SimulatedGpu

PROGRAM = """
import argparse, os, pathlib, sys
print("imported")
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=1)
batch = parser.parse_args().batch
pathlib.Path("batch.txt").write_text(str(batch))
print(batch, os.environ.get("PYTORCH_ALLOC_CONF"), os.environ["HF_HUB_OFFLINE"], sys.orig_argv[-1])
sys.exit(batch)
"""
# what keeps a program from being forked there
OTHERS = {
    "reads none": "print(1)",
    "ends before": "import sys\nraise SystemExit(3)",
    "has a thread": "import sys, threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()\nsys.argv[1:]",
    "has other arguments": "import sys\nsys.argv.insert(9, 'x')\nsys.argv[1:]",
}
ALLOCATES = "import sys, time, torch\ntorch.zeros(3, device='cuda')\ntime.sleep(100)\nsys.argv[1:]"


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["train.py"]


def settings(folder: Path) -> Mapping[str, str]:
    folder.mkdir()
    gpu = SimulatedGpu(gpu="h200", limit_bytes=1 << 30)
    return environment_of(Settings(mode=Mode.RUN, output=folder, simulated=gpu))


@pytest.mark.usefixtures("own_folder")
def test_branches_have_their_arguments_variables_and_exit_codes(tmp_path: Path) -> None:
    Path("train.py").write_text(PROGRAM)
    words = [sys.executable, "train.py", "--batch", "1"]
    trunk = Trunk(words, settings(tmp_path / "trunk"), tmp_path / "trunk")
    try:
        logs, started = [tmp_path / "run0" / "log", tmp_path / "run1" / "log"], []
        for number, log in enumerate(logs):
            environment = {**settings(log.parent), "PYTORCH_ALLOC_CONF": f"max_split_size_mb:{20 + number}"}
            started.append(trunk.branch([*words[:3], str(number + 5), "--batch", str(number + 6)], environment, log))
        assert [branch and branch.wait() for branch in started] == [6, 7]
        assert logs[0].read_text() == "6 max_split_size_mb:20 1 6\n"
        assert logs[1].read_text() == "7 max_split_size_mb:21 1 7\n"
        # read by libraries when they are imported
        other = {**settings(tmp_path / "run2"), "OMP_NUM_THREADS": "3"}
        assert trunk.branch(words, other, tmp_path / "run2" / "log") is None
    finally:
        trunk.stop()
        Path("batch.txt").unlink()


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize(
    "program",
    [*OTHERS.values(), pytest.param(ALLOCATES, marks=pytest.mark.slow)],
    ids=[*OTHERS, "allocates before"],
)
def test_a_program_that_cannot_be_forked_there_has_no_branches(program: str, tmp_path: Path) -> None:
    Path("train.py").write_text(program)
    words = [sys.executable, "train.py", "1"]
    trunk = Trunk(words, settings(tmp_path / "trunk"), tmp_path / "trunk")
    try:
        assert trunk.branch([*words[:2], "2"], settings(tmp_path / "run"), tmp_path / "run" / "log") is None
    finally:
        trunk.stop()


def test_words_of_a_launcher_end_as_the_programs_arguments() -> None:
    base = ["trl", "sft", "--config", "a.yaml", "--bf16"]
    inner = ["sft.py", "--config", "a.yaml", "--bf16"]
    assert arguments_of(inner, base, [*base, "--batch", "2"]) == [*inner, "--batch", "2"]
    assert arguments_of(inner, base, ["trl", "sft", "--config", "b.yaml"]) == ["sft.py", "--config", "b.yaml"]
    assert arguments_of(["sft.py", "--bf16"], base, ["trl", "dpo"]) is None


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py --lr 1", True),
        ("python -m trl.scripts.sft --config a.yaml", True),
        ("trl sft --config a.yaml", True),
        ("accelerate launch --num_processes 1 train.py", True),
        ("accelerate launch --num_processes 8 train.py", False),
        ("torchrun --nproc-per-node 8 train.py", False),
        ("deepspeed train.py", False),
    ],
)
def test_commands_of_one_process_branch(command: str, expected: bool) -> None:
    assert can_branch(command.split()) is expected
