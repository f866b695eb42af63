import pickle
from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import SnapshotFormatError
from ligerprof.roles import Phase
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from ligerprof.snapshots.stamp import SavedTensor, with_saved_tensors

ROWS = [
    SavedTensor(5, 0, 2**40, 1024, "MulBackward0", "layers.0", "silu"),
    SavedTensor(6, 1, 2**40 + 512, 2048, "PowBackward0", "", ""),
    SavedTensor(7, 0, 0, 1, "MulBackward0", "layers.1", "silu"),
]
EMPTY: dict[str, Any] = {"segments": [], "device_traces": [[]]}


def test_saved_tensors_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(with_saved_tensors(EMPTY, ROWS)))
    assert read_snapshot(path).saved_tensors == ROWS


def test_names_of_a_file_are_escaped() -> None:
    rows = [SavedTensor(5, 0, 2**40, 1024, "Mul\x1b[2JBackward0", "a\nb", "")]
    (read,) = Snapshot.from_dict(with_saved_tensors(EMPTY, rows)).saved_tensors
    assert (read.node + read.module + read.operation).isprintable()


def test_snapshot_of_torch_has_none() -> None:
    assert Snapshot.from_dict(EMPTY).saved_tensors == ()
    assert Snapshot.from_dict({**EMPTY, "ligerprof": {"other": 1}}).saved_tensors == ()
    assert list(Snapshot.from_dict(with_saved_tensors(EMPTY, [])).saved_tensors) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("names", None),
        ("names", [1, 2, 3, 4, 5, 6]),
        ("time_us", [1, 2]),
        ("address", [0, 0, 2**62]),
        ("size_bytes", [0, 0, -1]),
        ("device", [0, 0, True]),
        ("node", [0, 0, 99]),
        ("module", "text"),
    ],
)
def test_damaged_table_is_an_error(key: str, value: Any) -> None:
    damaged = with_saved_tensors(EMPTY, ROWS)
    damaged["ligerprof"]["saved_tensors"][key] = value
    with pytest.raises(SnapshotFormatError, match="'ligerprof' is not what a recorder of ligerprof writes"):
        Snapshot.from_dict(damaged)


def test_peaks_of_phases_that_a_recording_leaves_out_survive_and_are_checked() -> None:
    peaks = {Phase.GENERATION: 7 * 2**30, Phase.SCORING: 512}
    whole = with_saved_tensors(EMPTY, ROWS, peaks)
    assert Snapshot.from_dict(whole).phase_peaks == peaks
    assert Snapshot.from_dict(with_saved_tensors(EMPTY, ROWS)).phase_peaks == {}
    for damaged in ([], {"dreaming": 1}, {"forward": "1"}, {"forward": -1}):
        whole["ligerprof"]["phase_peaks"] = damaged
        with pytest.raises(SnapshotFormatError, match="damaged"):
            Snapshot.from_dict(whole)
