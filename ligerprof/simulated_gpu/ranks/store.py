"""The store of simulated ranks: a file that all of them share, as torchrun's server is."""

import datetime as dt
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ligerprof.errors import UnsupportedError
from ligerprof.simulated_gpu.ranks.messages import Messages
from ligerprof.simulated_gpu.values import place

_POLL_SECONDS = 0.01
# a rank that is started imports the program's libraries first, which takes minutes on a busy machine
_UNTIL_REFUSED_SECONDS = 600.0


# torch describes neither as part of its module
_distributed: Any = dist
_Store: Any = _distributed.Store
_FileStore: Any = _distributed.FileStore


class WorldStore(_Store):  # type: ignore[misc]
    """Keys and values of the ranks that run.

    Args:
        folder: the folder of the world.
        messages: which other ranks there are.
    """

    def __init__(self, folder: Path, messages: Messages) -> None:
        super().__init__()
        self._file, self._messages = _FileStore(str(folder / "store"), -1), messages

    def set(self, key: str, value: Any) -> None:
        """Set a value."""
        self._file.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of a key, once a rank has set it."""
        self.wait([key])
        value: bytes = self._file.get(key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a number."""
        return int(self._file.add(key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a value if it is the expected one."""
        value: bytes = self._file.compare_set(key, expected, desired)
        return value

    def check(self, keys: list[str]) -> bool:
        """Whether all of these are set."""
        return bool(self._file.check(keys))

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return bool(self._file.delete_key(key))

    def num_keys(self) -> int:
        """The number of keys."""
        return int(self._file.num_keys())

    # the names that C++ calls
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815

    def wait(self, keys: list[str], timeout: dt.timedelta | None = None) -> None:
        """Wait until a rank has set all of these.

        Raises:
            UnsupportedError: none of the ranks that run does.
        """
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
