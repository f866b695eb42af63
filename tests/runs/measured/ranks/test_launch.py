import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from ligerprof.errors import LigerprofError, MissingDependencyError
from ligerprof.roles import Phase
from ligerprof.runs.measured import ranks as launch
from ligerprof.runs.measured.ranks import run_ranks
from ligerprof.runs.outcome import OutOfMemory, Progress, StepOutcome


def outcome(peak_bytes: int, *, oom: bool = False) -> StepOutcome:
    refused = OutOfMemory(
        requested_bytes=1, allocated_bytes=2, reserved_bytes=3, limit_bytes=4, phase=Phase.FORWARD, step=1
    )
    return StepOutcome(
        backend="measured",
        gpu="none",
        peak_bytes=peak_bytes,
        reserved_bytes=peak_bytes,
        first_step_peak_bytes=0,
        first_step_reserved_bytes=0,
        phases={},
        after_phase={},
        profiled_step=2,
        snapshot={"segments": [], "device_traces": []},
        oom=refused if oom else None,
    )


def rank() -> int:
    return int(os.environ["RANK"])


def wait_forever() -> None:
    time.sleep(600)


def reports(progress: Progress) -> StepOutcome:
    progress(f"rank {rank()} of {os.environ['WORLD_SIZE']} at {os.environ['MASTER_ADDR']}")
    print("noise")
    return outcome(1000 + rank())


def dies(how: str, progress: Progress) -> StepOutcome:
    """Rank 1 ends as `how` says; the other waits for it as a collective would."""
    if rank() != 1:
        wait_forever()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        os._exit(7)
    if how == "refuses":
        raise MissingDependencyError("no such package")
    raise ValueError("first line\nsecond line")


def runs_out(both: bool, progress: Progress) -> StepOutcome:
    if rank() == 1 or both:
        return outcome(rank(), oom=True)
    wait_forever()
    raise AssertionError


def fails_beside_one_that_ran_out(progress: Progress) -> StepOutcome:
    if rank() == 0:
        raise ValueError("the other rank is gone")
    time.sleep(0.3)
    return outcome(5, oom=True)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 1.5)


def test_every_rank_reports_and_only_rank_0_is_heard(tmp_path: Path) -> None:
    heard: list[str] = []
    found = run_ranks(reports, 2, tmp_path, heard.append)
    assert {rank: each.peak_bytes for rank, each in found.items()} == {0: 1000, 1: 1001}
    assert heard == ["rank 0 of 2 at 127.0.0.1"]
    # what a rank prints is kept from standard output, and kept
    assert (tmp_path / "rank-1.log").read_text() == "noise\n"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("killed", r"rank 1 was ended by SIGKILL \(did main memory run out\?\)"),
        ("exits", "rank 1 ended with exit code 7"),
        ("raises", r"rank 1 failed \(ValueError: first line\)"),
        ("refuses", "^no such package$"),
    ],
)
def test_a_rank_that_dies_ends_the_others_in_one_line(how: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(LigerprofError, match=says) as caught:
        run_ranks(partial(dies, how), 2, tmp_path, print)
    assert "\n" not in str(caught.value)
    if how == "raises":
        assert "second line" in (tmp_path / "rank-1.log").read_text()


@pytest.mark.parametrize("both", [False, True])
def test_out_of_memory_on_any_rank_is_an_outcome(both: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if both:
        # however late the other one is
        monkeypatch.setattr(launch, "_GRACE_SECONDS", 60)
    found = run_ranks(partial(runs_out, both), 2, tmp_path, print)
    assert sorted(found) == ([0, 1] if both else [1])
    assert found[1].oom is not None


def test_out_of_memory_explains_what_fails_after_it(tmp_path: Path) -> None:
    found = run_ranks(fails_beside_one_that_ran_out, 2, tmp_path, print)
    assert [found[rank].oom is not None for rank in found] == [True]


def test_ranks_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from ligerprof.runs.measured.ranks import run_ranks\n"
        "def work(progress):\n"
        "    progress(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    run_ranks(work, 1, Path(sys.argv[1]), lambda text: print(text, flush=True))\n"
    )
    program = tmp_path / "program.py"
    program.write_text(script)
    parent = subprocess.Popen([sys.executable, str(program), str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 300
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
