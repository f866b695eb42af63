"""Ctrl-C ends every command with exit code 130 and without a traceback, at any moment."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ligerprof.cli.main import COMMANDS, main
from tests.sampling import sampled

pytestmark = pytest.mark.timeout(120)

# how a module named torch behaves while it is imported
WAITS = "time.sleep(600)"
CONVERTS = "\ntry:\n    time.sleep(600)\nexcept BaseException:\n    raise ImportError('torch is broken')"
SWALLOWS = "\nwhile True:\n    try:\n        time.sleep(600)\n    except BaseException:\n        pass"
IN_A_STRING = "exec('time.sleep(600)')"
STEP = ("step", "--model", "tiny", "--batch", "1", "--seq", "64", "--device", "simulated", "-o", "run")
SWEEP = ("sweep", "--model", "tiny", "--batch", "1", "--device", "simulated", "-o", "sweep")


def interrupted(folder: Path, *arguments: str, at: str, file: str = "stderr") -> tuple[int, str]:
    """Exit code and stderr of a command that gets SIGINT once a file, its stderr by default, has the text `at`."""
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from ligerprof.__main__ import run; run()"
    )
    with (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            # a shell's background jobs ignore the signal
            [sys.executable, "-c", program, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        while process.poll() is None and not any(at in path.read_text() for path in folder.glob(file)):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        return process.wait(), (folder / "stderr").read_text()
    finally:
        process.kill()
        process.wait()


def processes_in(folder: Path) -> list[Path]:
    """The running processes that were started in a folder."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            found += [link.parent] if link.readlink() == folder else []
    return found


def write_torch(folder: Path, behaviour: str) -> None:
    """Make `import torch` print a line and then behave."""
    (folder / "torch.py").write_text(
        f"import sys, time\nprint('importing', file=sys.stderr, flush=True)\n{behaviour}\n"
    )


@sampled("behaviour", [WAITS, CONVERTS, SWALLOWS, IN_A_STRING], ids=["waits", "converts", "swallows", "exec"], every=2)
def test_an_import_is_interrupted(behaviour: str, tmp_path: Path) -> None:
    write_torch(tmp_path, behaviour)
    code, printed = interrupted(tmp_path, *STEP, at="importing")

    assert code == 130
    assert "Traceback" not in printed
    assert not (tmp_path / "run").exists()


def test_a_sweep_whose_cell_still_imports_is_interrupted(tmp_path: Path) -> None:
    write_torch(tmp_path, SWALLOWS)
    code, printed = interrupted(tmp_path, *SWEEP, at="importing", file="sweep/runs/*.log")

    assert code == 130
    assert "Traceback" not in printed
    while processes_in(tmp_path):
        time.sleep(0.1)


@sampled("at", ["building", "step 1 of 2"], every=2)
def test_a_simulated_step_is_interrupted(at: str, tmp_path: Path) -> None:
    # so many micro-batches that the signal arrives before the result is written
    code, printed = interrupted(tmp_path, *STEP, "--grad-accum", "60", at=at)

    assert code == 130
    assert "Traceback" not in printed
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupt_in_any_command_is_exit_130(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_context: click.Context) -> None:
        raise KeyboardInterrupt

    command = main.get_command(click.Context(main), name)
    assert command is not None
    monkeypatch.setattr(command, "invoke", interrupt)
    monkeypatch.setattr(command, "parse_args", lambda _context, _arguments: [])
    result = CliRunner().invoke(main, [name])

    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "\ninterrupted\n")
