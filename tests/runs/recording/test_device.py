"""The ledger of a GPU: rows add up to what the driver has in use, whatever the driver tells."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ligerprof.cli.main import main
from ligerprof.reports.page.peak import html_devices
from ligerprof.reports.run import _device_parts
from ligerprof.runs.recording.device import (
    DeviceMoment,
    DeviceProcess,
    DeviceReport,
    DeviceWatch,
    Pool,
    device_reports,
    pool_name,
    torch_pools,
)
from ligerprof.runs.recording.live import Live, LiveFile
from ligerprof.runs.recording.patches import Patches
from ligerprof.units import GIB, MIB
from tests.paths import RECORDINGS


def moment(at_us: int, used_bytes: int, *pools: Pool, **named: Any) -> DeviceMoment:
    values = {"step": 2, "event": "step", "total_bytes": 140 * GIB, **named}
    return DeviceMoment(at_us=at_us, pools=pools, used_bytes=used_bytes, **values)


def pool(name: str, reserved_bytes: int, allocated_bytes: int = 0) -> Pool:
    return Pool(name=name, reserved_bytes=reserved_bytes, allocated_bytes=allocated_bytes)


def process(pid: int, *moments: DeviceMoment, **named: Any) -> DeviceProcess:
    return DeviceProcess(name=f"rank {pid}", pid=pid, uuid="GPU-1", moments=moments, **{"ended": False, **named})


def only(*processes: DeviceProcess) -> DeviceReport:
    (report,) = device_reports(processes)
    return report


def test_rows_of_two_processes_add_up_and_name_pools_contexts_and_others() -> None:
    listed = {1: 9 * GIB, 2: 5 * GIB, 77: 2 * GIB}
    first = process(
        1,
        moment(10, 4 * GIB, pool("default pool", 3 * GIB)),
        moment(30, 17 * GIB, pool("default pool", 6 * GIB, 5 * GIB), pool("CUDA graphs 1", 2 * GIB), processes=listed),
    )
    second = process(
        2, moment(20, 9 * GIB, pool("default pool", 4 * GIB)), moment(40, 9 * GIB, pool("default pool", 0))
    )
    fullest = only(first, second).fullest
    sizes = {(row.process, row.part.partition(":")[0]): row.size_bytes for row in fullest.rows}
    assert sizes == {
        ("rank 1", "default pool"): 6 * GIB,
        ("rank 1", "CUDA graphs 1"): 2 * GIB,
        ("rank 1", "outside torch's allocator"): GIB,
        ("rank 2", "default pool"): 4 * GIB,
        ("rank 2", "outside torch's allocator"): GIB,
        (None, "process 77"): 2 * GIB,
        (None, "the driver, in no process"): GIB,
    }
    assert sum(sizes.values()) == fullest.moment.used_bytes


@pytest.mark.parametrize("listed", [{}, {1: 9 * GIB, 500: 4 * GIB}], ids=["nothing listed", "ids of the host"])
def test_what_the_driver_does_not_tell_apart_is_one_row(listed: dict[int, int]) -> None:
    first = process(1, moment(30, 13 * GIB, pool("default pool", 8 * GIB), processes=listed))
    second = process(2, moment(20, 9 * GIB, pool("default pool", 3 * GIB)))
    rows = only(first, second).fullest.rows
    assert rows[-1].part == "contexts, libraries and other processes, not told apart"
    assert sum(row.size_bytes for row in rows) == 13 * GIB


def test_a_process_that_has_ended_holds_nothing() -> None:
    first = process(1, moment(30, 13 * GIB, pool("default pool", 8 * GIB)))
    second = process(2, moment(20, 9 * GIB, pool("default pool", 3 * GIB)), ended=True)
    assert {row.process for row in only(first, second).fullest.rows} == {"rank 1", None}


def test_gpus_have_reports_of_their_own() -> None:
    other = DeviceProcess(name="rank 1", pid=2, uuid="GPU-2", moments=(moment(20, GIB),), ended=True)
    assert len(device_reports([process(1, moment(10, GIB)), other, process(3)])) == 2


def test_an_engine_that_sleeps_holds_less_than_torch_counts_and_one_that_frees_nothing_is_a_finding() -> None:
    asleep = moment(10, 3 * GIB, pool("MemPool or graphs' handle 1", 40 * GIB), event="sleep", freed_bytes=38 * GIB)
    useful = only(process(1, asleep))
    assert [row.size_bytes for row in useful.fullest.rows] == [40 * GIB, -37 * GIB]
    assert not list(useful.notes())
    stuck = moment(10, 41 * GIB, pool("default pool", 40 * GIB), event="sleep", freed_bytes=0)
    emptied = process(1, stuck, emptied=(3, 0))
    assert list(only(emptied).notes()) == [
        "torch.cuda.empty_cache() freed 0 bytes in rank 1, in 3 calls",
        "the engine in rank 1 freed 0 bytes when it went to sleep",
    ]


def test_pools_have_names_by_torchs_numbers() -> None:
    assert pool_name((0, 0)) == "default pool"
    assert pool_name((2, 0)) == "CUDA graphs 2"
    assert pool_name((0, 3)) == "MemPool or graphs' handle 3"


def segment(pool_id: tuple[int, int], total: int, allocated: int, device: int = 0) -> dict[str, Any]:
    sizes = {"total_size": total, "allocated_size": allocated, "device": device}
    return {**sizes, "segment_pool_id": pool_id, "blocks": []}


def test_pools_are_summed_by_segment_and_an_older_torch_is_not_asked_for_its_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segments = [segment((0, 0), 20, 5), segment((0, 0), 2, 1), segment((1, 0), 7, 7), segment((0, 0), 9, 9, device=1)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda include_traces: segments)
    assert torch_pools(0, is_recorded=True) == (pool("default pool", 22, 6), pool("CUDA graphs 1", 7, 7))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    counters = {"reserved_bytes": {"all": {"current": 29}}, "allocated_bytes": {"all": {"current": 13}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _device: counters)
    assert torch_pools(0, is_recorded=True) == (pool("all pools", 29, 13),)
    assert torch_pools(0, is_recorded=False) == (pool("default pool", 22, 6), pool("CUDA graphs 1", 7, 7))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A GPU of 24 GiB without NVML, whose reserved and used bytes the test sets."""
    state = {"reserved": 4 * GIB, "used": 5 * GIB}
    answers: dict[str, Any] = {
        "current_device": lambda: 0,
        "get_device_properties": lambda _device: SimpleNamespace(uuid="none"),
        "mem_get_info": lambda *_device: (24 * GIB - state["used"], 24 * GIB),
        "memory_reserved": lambda: state["reserved"],
        "memory_snapshot": lambda include_traces: [segment((0, 0), state["reserved"], GIB)],
        "memory_stats_as_nested_dict": lambda *_device: {
            f"{name}_bytes": {"all": {"current": state["reserved"], "peak": 6 * GIB}}
            for name in ("allocated", "reserved")
        },
        "is_current_stream_capturing": lambda: False,
        "empty_cache": lambda: state.update(reserved=state["reserved"] - state.pop("cached", 0)),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.cuda.memory, "empty_cache", answers["empty_cache"])
    return state


def test_what_empty_cache_frees_is_counted_until_the_recording_ends(gpu: dict[str, int]) -> None:
    watch, patches = DeviceWatch(), Patches()
    watch.observe(patches, lambda _event, _freed_bytes: None)
    torch.cuda.empty_cache()
    gpu["cached"] = 3 * MIB
    torch.cuda.memory.empty_cache()
    assert watch.emptied == [2, 3 * MIB]
    patches.undo()
    torch.cuda.empty_cache()
    assert watch.emptied == [2, 3 * MIB]


def test_an_engine_that_goes_to_sleep_is_noted_with_what_it_frees(
    gpu: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vllm" / "v1" / "worker"
    folder.mkdir(parents=True)
    (folder / "gpu_worker.py").write_text("class Worker:\n    def sleep(self, level=1):\n        self.release(level)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    watch, patches, noted = DeviceWatch(), Patches(), []
    watch.observe(patches, lambda event, freed_bytes: noted.append((event, freed_bytes)))
    import vllm.v1.worker.gpu_worker as engine  # type: ignore[import-not-found]

    worker = engine.Worker()
    worker.release = lambda level: gpu.update(used=gpu["used"] - level * GIB)
    worker.sleep(level=2)
    assert noted == [("sleep", 2 * GIB)]
    patches.undo()


def test_live_json_has_the_moments_and_keeps_the_fullest_of_many(gpu: dict[str, int], tmp_path: Path) -> None:
    live = LiveFile(tmp_path, lambda: (), DeviceWatch())
    for number in range(600):
        gpu["used"] = (20 if number == 7 else 5) * GIB
        live.note_device(number, "step", is_recorded=True)
    live.note(600, is_last=True)
    found = Live.read(tmp_path).on_device("rank 0")
    assert len(found.moments) < 300
    assert found.moments[-1].event == "end"
    assert max(each.used_bytes for each in found.moments) == 20 * GIB
    assert found.ended
    assert only(found).fullest.moment.step == 7


def test_the_report_shows_the_fullest_moment() -> None:
    first = process(1, moment(30, 13 * GIB, pool("default pool", 8 * GIB, 7 * GIB)))
    line, _table = _device_parts(only(first))
    assert line == "The whole GPU, the fullest of 1 looks, as rank 1 began step 2: 13.00 GiB of 140.00 GiB in use."


def test_the_page_shows_the_parts_of_every_look_one_upon_the_other() -> None:
    sleeping = {"event": "sleep", "freed_bytes": 0, "step": 3}
    looks = [
        moment(10, 40 * GIB, pool("default pool", 30 * GIB)),
        moment(20, 80 * GIB, pool("default pool", 50 * GIB), pool("CUDA graphs 1", 10 * GIB)),
        moment(30, 20 * GIB, pool("default pool", 50 * GIB), **sleeping),
    ]
    html = "".join(html_devices([only(process(1, *looks))])).replace("\xa0", " ")
    assert "<h2>The whole GPU</h2>" in html
    assert "freed 0 bytes when it went to sleep" in html
    boxes = re.findall(r'<rect x="(.*?)" y="(.*?)" width=".*?" height="(.*?)".*?<title>(.*?)</title>', html)
    fullest = [(float(y), float(height), title) for x, y, height, title in boxes if x == boxes[2][0]]
    assert [title.partition(",")[0] for _, _, title in fullest] == [
        "rank 1 default pool: 50.00 GiB",
        "rank 1 CUDA graphs 1: 10.00 GiB",
        "contexts",
    ]
    # the fullest look fills the chart, without gaps
    assert fullest[0][0] + fullest[0][1] == pytest.approx(220)
    assert [y for y, _, _ in fullest[:-1]] == pytest.approx([y + height for y, height, _ in fullest[1:]])
    assert fullest[-1][0] == pytest.approx(0)
    # what torch counts as reserved and the driver does not
    assert any("-30.00 GiB, sleep of rank 1" in title and float(height) == 0 for _, _, height, title in boxes)


def test_the_page_has_a_bounded_number_of_columns() -> None:
    looks = [moment(number, (70 if number == 511 else 50) * GIB) for number in range(2000)]
    html = "".join(html_devices([only(process(1, *looks))])).replace("\xa0", " ")
    assert html.count("<rect") == 200
    assert "70.00 GiB, step 2 of rank 1" in html


def test_explain_writes_the_ledger_of_a_run_to_its_page(gpu: dict[str, int], tmp_path: Path) -> None:
    shutil.copy(RECORDINGS / "small-streams.pickle.xz", tmp_path / "snapshot.pickle")
    gpu["used"] = 20 * GIB
    LiveFile(tmp_path, lambda: (), DeviceWatch()).note(1, is_last=True)
    page = tmp_path / "page.html"
    done = CliRunner().invoke(main, ["explain", str(tmp_path), "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert "The whole GPU, the fullest of 1 looks, at the end of rank 0: 20.00 GiB" in page.read_text().replace(
        "\xa0", " "
    )
