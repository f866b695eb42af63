from pathlib import Path

import pytest

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots.reader import rank_snapshots


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (("rank0.pickle", "rank1.pickle", "rank10.pickle"), [0, 1, 10]),
        (("rank1_memory_snapshot.pickle", "rank0_memory_snapshot.pickle"), [0, 1]),
        (("run-8gpus-rank-0.pickle.xz", "run-8gpus-rank-7.pickle.gz"), [0, 7]),
        (("Apr_10_host.3.pickle", "Apr_10_host.5.pickle"), [3, 5]),
        (("snapshot_0.pkl", "snapshot_1.pkl", "notes.txt"), [0, 1]),
        (("rank-0/snapshot.pickle", "rank-1/snapshot.pickle", "logs/out.txt"), [0, 1]),
    ],
)
def test_ranks_are_read_from_names(tmp_path: Path, names: tuple[str, ...], ranks: list[int]) -> None:
    found = rank_snapshots(make(tmp_path, *names))

    assert list(found) == ranks
    assert all(path.is_file() and str(rank) in str(path.relative_to(tmp_path)) for rank, path in found.items())


def test_a_run_directory_is_no_folder_of_ranks(tmp_path: Path) -> None:
    assert rank_snapshots(make(tmp_path, "snapshot.pickle", "snapshot-rank1.pickle")) == {}


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ((), "neither snapshot.pickle nor snapshots of several ranks"),
        (("rank0.pickle",), "neither snapshot.pickle nor snapshots of several ranks"),
        (("before.pickle", "after.pickle"), "which of its 2 snapshots"),
        (("step1-rank0.pickle", "step2-rank0.pickle"), "which of its 2 snapshots"),
        (("rank0.pickle", "rank1.pickle", "old.pickle"), "which of its 3 snapshots"),
        (("a1_b1.pickle", "a2_b2.pickle"), "which of its 2 snapshots"),
        (
            ("001/snapshot.pickle", "001/result.json", "002/snapshot.pickle", "002/result.json"),
            "its 2 folders are runs of their own",
        ),
    ],
)
def test_a_folder_of_anything_else_is_refused(tmp_path: Path, names: tuple[str, ...], says: str) -> None:
    with pytest.raises(SnapshotFormatError, match=says):
        rank_snapshots(make(tmp_path, *names))
