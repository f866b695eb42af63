import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ligerprof.recipe.categories import Axis, Device
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.sweep import runner as sweep_runner
from ligerprof.runs.sweep.cells import Cell, CellStatus, Grid, SweepFolder, cell_key, expand
from ligerprof.runs.sweep.runner import CellProcess, Runner, SweepInterruptedError, SweepSettings, Watcher, find_borders
from ligerprof.runs.sweep.starting import CellStarter
from tests.runs.sweep.imports import CRASHES, HANGS

# prints what a step prints, without running one
STEP = """
import json, sys
recipe = json.loads(sys.argv[1])
fits = recipe["batch"] * recipe["seq"] <= {limit}
print(json.dumps({{"schema": 1, "kind": "step", "backend": "simulated", "gpu": "none", "peak_bytes": 5, "phases": {{}},
                   "reserved_bytes": 6, "roles": {{"other": 5}}, "oom": None if fits else {{"limit_bytes": 7}},
                   "recipe": recipe}}))
sys.exit(0 if fits else 3)
"""
CRASH = "import sys; print('first', file=sys.stderr); print('Error: no luck', file=sys.stderr); sys.exit(1)"
ENDLESS = "import time; time.sleep(600)"
KILLED = "import os, sys; print('stepping', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
SILENT = "raise SystemExit(7)"
NO_JSON = "print('{')"

MakeRunner = Callable[..., tuple[Runner, "Records"]]
# measured cells are new processes, simulated ones are forked where that is possible
needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="cells are forked on Linux only")
both_devices = pytest.mark.parametrize("device", ["cuda", "simulated"])


class Records(Watcher):
    """A watcher that records the cells."""

    def __init__(self) -> None:
        super().__init__()
        self.ended_cells: list[Cell] = []

    def ended(self, cell: Cell) -> None:
        self.ended_cells.append(cell)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make every cell run a script instead of a step, with its recipe as the argument."""

    def use(script: str) -> None:
        def words(cell: CellProcess) -> tuple[str, ...]:
            return ("-m", "tests.runs.sweep.scripted", script, json.dumps(cell.recipe.to_json()))

        monkeypatch.setattr(CellProcess, "_words", words)

    return use


@pytest.fixture
def make_runner(tmp_path: Path) -> Iterator[MakeRunner]:
    """Make runners of one folder; they share a worker, which imports next to nothing."""
    with CellStarter(tmp_path, prepares="tests.runs.sweep.imports:prepare") as starter:

        def make(settings: SweepSettings | None = None) -> tuple[Runner, Records]:
            folder = SweepFolder(path=tmp_path / "sweep")
            folder.make()
            folder.record_grids([])
            records = Records()
            return Runner(folder, settings or SweepSettings(), records, starter), records

        yield make


def answer_at_once(monkeypatch: pytest.MonkeyPatch, largest_tokens: int) -> None:
    """Make cells end without a process, out of memory above `largest_tokens`."""

    class Answered:
        def __init__(self, recipe: TrainingRecipe, *_: object) -> None:
            self.recipe, self.key = recipe, cell_key(recipe)

        def poll(self) -> dict[str, object]:
            status = "done" if self.recipe.tokens <= largest_tokens else "oom"
            return {"key": self.key, "status": status, "recipe": self.recipe.to_json()}

    monkeypatch.setattr(sweep_runner, "CellProcess", Answered)
    monkeypatch.setattr(sweep_runner, "_POLL_SECONDS", 0)


def recipes(*batches: int, device: str = "simulated") -> tuple[TrainingRecipe, ...]:
    options = {"model": ("tiny",), "seq": (64,), "batch": batches, "device": (Device(device),)}
    return expand([Grid(options=options)], lambda _: None)[0]


def statuses(records: Records) -> list[str]:
    return [f"{cell.recipe.batch} {cell.status.value}" for cell in records.ended_cells]


def test_rows_are_in_order_and_finished_cells_do_not_run_again(
    make_runner: MakeRunner, scripted: Callable[[str], None]
) -> None:
    scripted(STEP.format(limit=150))
    runner, records = make_runner()
    runner.run(recipes(1, 2, 4))
    assert statuses(records) == ["1 done", "2 done", "4 oom"]
    again, later = make_runner()
    again.run(recipes(1, 2, 3, 4))
    assert (statuses(later), later.expected_count) == (["3 oom"], 1)
    forced, all_again = make_runner(SweepSettings(again=True))
    forced.run(recipes(1, 4))
    assert statuses(all_again) == ["1 done", "4 oom"]


@both_devices
@pytest.mark.parametrize(
    ("script", "says"),
    [
        (CRASH, "no luck"),
        (KILLED, "killed (signal 9; did the host run out of memory?) after: stepping"),
        (SILENT, "ended with exit code 7 and printed nothing"),
        (NO_JSON, "ended with exit code 0 and printed nothing"),
        (ENDLESS, "took longer than 1 s and was ended"),
    ],
    ids=["crash", "killed", "silent", "no JSON", "endless"],
)
def test_a_failed_cell_has_a_row_with_the_reason_and_runs_again(
    script: str, says: str, device: str, make_runner: MakeRunner, tmp_path: Path, scripted: Callable[[str], None]
) -> None:
    scripted(script)
    runner, records = make_runner(SweepSettings(timeout_seconds=1.0 if script == ENDLESS else None))
    runner.run(recipes(1, device=device))
    (cell,) = records.ended_cells
    assert (cell.status, cell.error) == (CellStatus.FAILED, says)
    scripted(STEP.format(limit=150))
    again, later = make_runner()
    again.run(recipes(1, device=device))
    assert statuses(later) == ["1 done"]
    assert SweepFolder(path=tmp_path / "sweep").read()[cell_key(cell.recipe)].status is CellStatus.DONE


def test_stop_at_oom_skips_sizes_above_one_out_of_memory(
    make_runner: MakeRunner, scripted: Callable[[str], None]
) -> None:
    scripted(STEP.format(limit=150))
    runner, records = make_runner(SweepSettings(stop_at_oom=True))
    left_out = runner.run(recipes(1, 2, 4, 8, 16))
    assert statuses(records) == ["1 done", "2 done", "4 oom"]
    assert ([recipe.batch for recipe in left_out], records.expected_count) == ([8, 16], 3)


@both_devices
def test_jobs_run_at_the_same_time(
    device: str, make_runner: MakeRunner, tmp_path: Path, scripted: Callable[[str], None]
) -> None:
    # each cell waits until all four have started
    meet = f"""
import os, pathlib, time
folder = pathlib.Path({str(tmp_path)!r})
(folder / f"{{os.getpid()}}.started").touch()
while len(list(folder.glob("*.started"))) < 4:
    time.sleep(0.01)
"""
    scripted(meet + STEP.format(limit=10_000))
    runner, records = make_runner(SweepSettings(jobs=4))
    runner.run(recipes(1, 2, 3, 4, device=device))
    assert sorted(statuses(records)) == ["1 done", "2 done", "3 done", "4 done"]


def test_a_border_lies_between_adjacent_sizes_and_known_cells_narrow_the_search(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_at_once(monkeypatch, largest_tokens=64 * 37)
    runner, records = make_runner()
    runner.run(recipes(1, 32, 64))
    (border,) = find_borders(runner, recipes(1, 32, 64), Axis.BATCH)
    assert (border.largest, border.smallest_oom, border.reason) == (37, 38, None)
    probes = [cell.recipe.batch for cell in records.ended_cells[3:]]
    assert len(set(probes)) == len(probes)
    assert all(32 < batch < 64 for batch in probes)
    (sequence,) = find_borders(runner, recipes(1), Axis.SEQ)
    assert (sequence.largest, sequence.smallest_oom) == (37 * 64, 38 * 64)


def test_a_failed_search_has_a_reason(make_runner: MakeRunner, scripted: Callable[[str], None]) -> None:
    scripted(CRASH)
    runner, _ = make_runner()
    (border,) = find_borders(runner, recipes(2), Axis.BATCH)
    assert (border.largest, border.smallest_oom) == (None, None)
    assert "no luck" in (border.reason or "")


@both_devices
def test_ctrl_c_ends_the_cell_with_its_children(
    device: str,
    make_runner: MakeRunner,
    tmp_path: Path,
    scripted: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = tmp_path / "child"
    spawn = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {ENDLESS!r}]); "
    scripted(spawn + f"open({str(child)!r}, 'w').write(f'{{p.pid}} '); p.wait()")
    runner, records = make_runner()

    def interrupt(_recipe: TrainingRecipe, _words: str) -> None:
        if child.exists() and child.read_text().endswith(" "):
            raise KeyboardInterrupt

    monkeypatch.setattr(records, "working", interrupt)
    with pytest.raises(SweepInterruptedError, match="cells left: 2"):
        runner.run(recipes(1, 2, device=device))
    assert not is_alive(int(child.read_text()))
    assert SweepFolder(path=tmp_path / "sweep").read() == {}


@needs_fork
def test_a_worker_that_crashes_fails_its_cell_and_is_replaced(
    make_runner: MakeRunner, scripted: Callable[[str], None]
) -> None:
    scripted(STEP.format(limit=64 * 2))
    runner, records = make_runner()
    runner.run([*recipes(1), *recipes(CRASHES), *recipes(2)])
    assert [cell.status for cell in records.ended_cells] == [CellStatus.DONE, CellStatus.FAILED, CellStatus.DONE]
    assert records.ended_cells[1].error == "ended with exit code -11 and printed nothing"


@needs_fork
def test_a_cell_that_waits_for_imports_is_cancelled_at_once(
    make_runner: MakeRunner, scripted: Callable[[str], None]
) -> None:
    scripted(STEP.format(limit=64 * 2))
    runner, records = make_runner(SweepSettings(timeout_seconds=0.5))
    runner.run(recipes(HANGS))
    assert records.ended_cells[0].error == "took longer than 0.5 s and was ended"


def is_alive(pid: int) -> bool:
    """Whether a process still runs after 2.5 s; a zombie does not."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return True
