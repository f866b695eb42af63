"""Find the snapshots of the ranks of one distributed run in a folder."""

import re
from pathlib import Path

from ligerprof.errors import SnapshotFormatError
from ligerprof.snapshots import SNAPSHOT_NAME

_SNAPSHOT_FILE = re.compile(r".*\.(?:pickle|pkl)(?:\.gz|\.xz)?", re.IGNORECASE)
_RANK = re.compile(r"(?<![a-z])rank[-_.]?(\d{1,6})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"(?<!\d)\d{1,6}(?!\d)")
_MOST_ENTRIES = 100_000
_HINT = "Name the files rank0.pickle, rank1.pickle and so on, or give one file."


def rank_snapshots(folder: Path) -> dict[int, Path]:
    """The snapshot of each rank, by rank: files in the folder, and run directories in it.

    A rank is the number after `rank` in a name. If no name has one, it is the one number in which the names differ.

    Returns:
        At least two ranks, or {} if the folder is a run directory itself.

    Raises:
        SnapshotFormatError: the folder cannot be read, has no snapshots of ranks, or two of one rank.
    """
    if (folder / SNAPSHOT_NAME).exists():
        return {}
    found = _snapshots_in(folder)
    ranks = _named_ranks(found) or _numbered_ranks(found)
    if len(ranks) != len(found):
        raise SnapshotFormatError(f"{folder}: which of its {len(found)} snapshots are ranks of one run? {_HINT}")
    if len(found) < 2:
        raise SnapshotFormatError(f"{folder}: neither {SNAPSHOT_NAME} nor snapshots of several ranks in it. {_HINT}")
    return dict(sorted(ranks.items()))


def _snapshots_in(folder: Path) -> dict[str, Path]:
    """Snapshot files by name, and those of run directories by the name of the directory."""
    found: dict[str, Path] = {}
    try:
        for number, entry in enumerate(folder.iterdir()):
            if number >= _MOST_ENTRIES:
                raise SnapshotFormatError(f"{folder}: more than {_MOST_ENTRIES} files. Give one file.")
            if entry.is_dir():
                if (entry / SNAPSHOT_NAME).exists():
                    found[entry.name] = entry / SNAPSHOT_NAME
            elif _SNAPSHOT_FILE.fullmatch(entry.name):
                found[entry.name] = entry
    except OSError as error:
        raise SnapshotFormatError(f"{folder}: cannot be read ({error.strerror}).") from None
    return found


def _named_ranks(found: dict[str, Path]) -> dict[int, Path]:
    return {int(match[1]): path for name, path in found.items() if (match := _RANK.search(name))}


def _numbered_ranks(found: dict[str, Path]) -> dict[int, Path]:
    """Ranks by the only number that differs between the names; {} if more than one does."""
    numbers = {name: _NUMBER.findall(name) for name in found}
    if len({(_NUMBER.sub("#", name), len(own)) for name, own in numbers.items()}) != 1:
        return {}
    differing = [set(place) for place in zip(*numbers.values(), strict=True)]
    places = [place for place, values in enumerate(differing) if len(values) > 1]
    return {int(numbers[name][places[0]]): path for name, path in found.items()} if len(places) == 1 else {}
