"""Files of any size and kind: several reads, pipes, devices, sparse files, and compressed data that grows."""

import gzip
import io
import lzma
import os
import pickle
from contextlib import suppress
from pathlib import Path

import pytest

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots import reader as packed
from ligerprof.snapshots.reader import allowed_bytes, read_bytes, read_snapshot
from ligerprof.units import GIB, MIB
from tests.torch_memory.allocator.programs import random_program

TIB = 1024 * GIB


class ShortReads(io.FileIO):
    """A file whose reads return less than asked for, as Linux's do beyond 2147479552 bytes."""

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return super().readinto(memoryview(buffer)[:1000])


def snapshot_bytes() -> bytes:
    return pickle.dumps(random_program(11, events=40).snapshot())


def test_a_file_is_read_whole_although_one_read_returns_only_a_part(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(snapshot_bytes())
    with ShortReads(path) as file:
        assert read_bytes(file).tobytes() == path.read_bytes()
        assert read_bytes(file).tobytes() == path.read_bytes()


def test_a_file_of_several_pieces_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_BYTES_AT_ONCE", 777)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(snapshot_bytes())
    with path.open("rb") as file:
        assert read_bytes(file).tobytes() == path.read_bytes()


@pytest.mark.parametrize("content", [b"", pickle.dumps({})])
def test_a_sparse_file_larger_than_memory_is_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "sparse.pickle"
    path.write_bytes(content)
    os.truncate(path, 15 * TIB)
    with pytest.raises(SnapshotFormatError, match="of memory that this machine has" if content else "not a pickle"):
        read_snapshot(path)


def test_pipes_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(SnapshotFormatError, match="a pipe or device, not a file"):
            read_snapshot(path)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
@pytest.mark.parametrize("seed", range(40))
def test_damaged_compressed_data_is_one_line_or_a_snapshot(pack: object, seed: int, tmp_path: Path) -> None:
    content = bytearray(pack(snapshot_bytes()))  # type: ignore[operator]
    content[(seed * 7919) % len(content)] ^= 1 << seed % 8
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    with suppress(SnapshotFormatError):
        read_snapshot(path)


def test_the_unpacked_size_is_limited_by_the_packed_size() -> None:
    sizes = [allowed_bytes(packed_bytes) for packed_bytes in (0, 10 * 2**10, MIB, 10 * MIB)]
    assert sizes == [64 * MIB, 64 * MIB, min(1000 * MIB, packed.memory_bytes()), min(GIB, packed.memory_bytes())]
