"""What ranks tell each other: numbers that the host knows, as files. Values that a model computes are not sent."""

import datetime as dt
import hashlib
import io
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ligerprof.errors import UnsupportedError
from ligerprof.simulated_gpu.files import unwatched
from ligerprof.simulated_gpu.ranks.world import NEIGHBOR, WANTED, World, has_ended, mark_rank
from ligerprof.simulated_gpu.values import place

_POLL_SECONDS = 0.01
_MOST_BYTES = 1 << 26
# floats that are counts or flags; longer ones are what a model computes
_MOST_FLOATS = 256
# ranks that are asked for and run at the same time, since each waits for what the others give
_MOST_TOGETHER = 16
Parts = list[Tensor | None]


def is_message(tensor: Tensor) -> bool:
    """Whether ranks exchange the values of such a tensor: sizes, objects and labels are integers; a few floats."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.numel() <= _MOST_FLOATS
    return tensor.numel() * tensor.element_size() <= _MOST_BYTES


class Messages:
    """Messages from and to the other ranks.

    Args:
        world: this process may be alone in it, if it has no folder.
        rank: this process's own, of the whole world.

    Attributes:
        is_alone: whether others send what this rank has itself, where they do not run.
    """

    is_alone = False

    def __init__(self, world: World, rank: int, size: int) -> None:
        asked = world.ranks or (0, size - 1)
        self._folder, self._rank = world.folder, rank
        self._together = frozenset(asked[:_MOST_TOGETHER]) if world.folder is not None else frozenset()
        self._numbers: Counter[str] = Counter()
        # by default all stages of the first rank's pipeline run
        self._follows = not world.ranks and (rank == 0 or rank not in asked)
        self._marked: set[tuple[int, str]] = set()

    def send(self, group: str, to: str, values: Tensor | None) -> None:
        """Leave the values for another rank, or for all; None if this rank does not know them."""
        self._leave(group, to, [values])

    def exchange(self, group: str, members: Sequence[int], parts: Parts, *, waits: bool = True) -> list[Parts]:
        """Give parts to the other members of a group, and have theirs.

        What a member gives that does not run is what the next one below it gives that does, or the first one that does.

        Args:
            parts: None for those that this rank does not know.
            waits: whether this rank needs what the others give.

        Returns:
            For each member what it gives.
        """
        to = f"everyone/{self._count(group)}"
        if self._rank in self._together:
            self._leave(group, to, parts)
        if not waits:
            return []
        given = {self._rank: parts}
        for rank in members:
            if rank in self._together and rank not in given:
                # after its end, as if it had what this rank has
                given[rank] = self._wait(group, rank, to, is_needed=False) or parts
        givers = [rank for rank in members if rank in self._together] or [self._rank]
        found, last = [], given[givers[0]]
        for rank in members:
            last = given[rank] if rank in givers else last
            found.append(parts if rank == self._rank else last)
        return found

    def run_together(self, members: Sequence[int]) -> bool:
        """Whether all of these ranks exchange what they have."""
        return self._together.issuperset(members)

    def meets(self, rank: int) -> None:
        """Have a rank run that this one sends to or receives from, unless ranks were asked for."""
        if self._follows:
            self._mark(rank, NEIGHBOR)

    def want_together(self) -> None:
        """Have all ranks run that were asked for."""
        for rank in self._together - {self._rank}:
            self._mark(rank, WANTED)

    def _mark(self, rank: int, mark: str) -> None:
        if self._folder is not None and (rank, mark) not in self._marked:
            self._marked.add((rank, mark))
            with unwatched():
                mark_rank(self._folder, rank, mark)

    def others_run(self) -> bool:
        """Whether another rank that was asked for has not ended."""
        others = self._together - {self._rank}
        return self._folder is not None and not all(has_ended(self._folder, rank) for rank in others)

    def _leave(self, group: str, to: str, parts: Parts) -> None:
        if self._folder is None:
            return
        buffer = io.BytesIO()
        _SAVE([None if part is None else part.detach().contiguous() for part in parts], buffer)
        path = self._path(group, self._rank, to)
        made = path.with_suffix(f".{self._rank}")
        with unwatched():
            made.write_bytes(buffer.getvalue())
            made.replace(path)

    def receive(self, group: str, sender: int, to: str) -> Tensor | None:
        """Wait for the values that another rank sends; None if it does not know them.

        Raises:
            UnsupportedError: it does not run, or ended before.
        """
        if self._folder is None and self.is_alone:
            return None
        found = self._wait(group, sender, to)
        return None if found is None else found[0]

    def skip(self, group: str, sender: int, to: str) -> None:
        """Go on without the next values that another rank sends."""
        self._count(f"{group}/{sender}/{to}")

    def _wait(self, group: str, sender: int, to: str, *, is_needed: bool = True) -> Parts | None:
        if self._folder is None:
            raise UnsupportedError(
                f"{place()}: this rank waits for rank {sender}, which does not run. Start the command with --world."
            )
        path = self._path(group, sender, to)
        while not path.exists():
            if has_ended(self._folder, sender) and not path.exists():
                if not is_needed:
                    return None
                raise UnsupportedError(
                    f"{place()}: rank {self._rank} waits for rank {sender}, which has ended. Its output says why."
                )
            self._mark(sender, WANTED)
            time.sleep(_POLL_SECONDS)
        parts: Parts = _LOAD(io.BytesIO(path.read_bytes()), weights_only=True)
        return parts

    def _path(self, group: str, sender: int, to: str) -> Path:
        """The file of the next message of a sender in a group: both sides count."""
        assert self._folder is not None
        kind = f"{group}/{sender}/{to}"
        name = hashlib.sha256(f"{kind}/{self._count(kind)}".encode()).hexdigest()[:32]
        return self._folder / f"message-{name}"

    def _count(self, kind: str) -> int:
        self._numbers[kind] += 1
        return self._numbers[kind]


# the machine replaces both
_SAVE, _LOAD = torch.save, torch.load
# a rank that is started imports the program's libraries first, which takes minutes on a busy machine
_UNTIL_REFUSED_SECONDS = 600.0
# torch describes neither as part of its module
_distributed: Any = dist
_Store: Any = _distributed.Store
_FileStore: Any = _distributed.FileStore


def _of_file(name: str) -> Callable[..., Any]:
    return lambda store, *arguments: getattr(store._file, name)(*arguments)


class WorldStore(_Store):  # type: ignore[misc]
    """Keys and values of the ranks that run: a file that all of them share, as torchrun's server is."""

    def __init__(self, folder: Path, messages: Messages) -> None:
        super().__init__()
        self._file, self._messages = _FileStore(str(folder / "store"), -1), messages

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._file.get(key)
        return value

    set, add, compare_set, check = map(_of_file, ("set", "add", "compare_set", "check"))
    # C++ calls the second names
    delete_key = deleteKey = _of_file("delete_key")  # noqa: N815
    num_keys = getNumKeys = _of_file("num_keys")  # noqa: N815

    def wait(self, keys: list[str], timeout: dt.timedelta | None = None) -> None:
        """Wait until a rank has set all of these; raises UnsupportedError if none of the ranks that run does."""
        seconds = _UNTIL_REFUSED_SECONDS if timeout is None else min(timeout.total_seconds(), _UNTIL_REFUSED_SECONDS)
        began = time.monotonic()
        while not self.check(keys):
            self._messages.want_together()
            if time.monotonic() - began > seconds or not self._messages.others_run():
                if self.check(keys):
                    return
                raise UnsupportedError(
                    f"{place()}: no rank that runs sets {', '.join(map(repr, keys))} in the store."
                    " Run the ranks that do with --ranks."
                )
            time.sleep(_POLL_SECONDS)
