"""What ranks tell each other: numbers that the host knows, as files. Values that a model computes are not sent."""

import hashlib
import io
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from ligerprof.errors import UnsupportedError
from ligerprof.simulated_gpu.ranks.world import has_ended, want_rank
from ligerprof.simulated_gpu.values import place

_POLL_SECONDS = 0.01
_MOST_BYTES = 1 << 26


def is_message(tensor: Tensor) -> bool:
    """Whether ranks exchange the values of a tensor of this type: sizes, objects and labels are integers."""
    floats = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return not floats and tensor.numel() * tensor.element_size() <= _MOST_BYTES


class Messages:
    """Messages from and to the other ranks.

    Args:
        folder: where they are; None for a world that this process is alone in.
        rank: this process's own, of the whole world.

    Attributes:
        is_alone: whether others send what this rank has itself, where they do not run.
    """

    is_alone = False

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._numbers: Counter[str] = Counter()

    def send(self, group: str, to: str, values: Tensor | None) -> None:
        """Leave the values for another rank, or for all; None if this rank does not know them."""
        if self._folder is None:
            return
        buffer = io.BytesIO()
        _SAVE(None if values is None else values.detach().contiguous(), buffer)
        path = self._path(group, self._rank, to)
        made = path.with_suffix(f".{self._rank}")
        made.write_bytes(buffer.getvalue())
        made.replace(path)

    def receive(self, group: str, sender: int, to: str) -> Tensor | None:
        """Wait for the values that another rank sends; None if it does not know them.

        Raises:
            UnsupportedError: it does not run, or ended before.
        """
        if self._folder is None and self.is_alone:
            return None
        if self._folder is None:
            raise UnsupportedError(
                f"{place()}: this rank waits for rank {sender}, which does not run. Start the command with --world."
            )
        path = self._path(group, sender, to)
        asked = False
        while not path.exists():
            if has_ended(self._folder, sender) and not path.exists():
                raise UnsupportedError(
                    f"{place()}: rank {self._rank} waits for rank {sender}, which has ended. Its output says why."
                )
            if not asked:
                want_rank(self._folder, sender)
                asked = True
            time.sleep(_POLL_SECONDS)
        values: Tensor | None = _LOAD(io.BytesIO(path.read_bytes()), weights_only=True)
        return values

    def _path(self, group: str, sender: int, to: str) -> Path:
        """The file of the next message of a sender in a group: both sides count."""
        assert self._folder is not None
        kind = f"{group}/{sender}/{to}"
        self._numbers[kind] += 1
        name = hashlib.sha256(f"{kind}/{self._numbers[kind]}".encode()).hexdigest()[:32]
        return self._folder / f"message-{name}"


# the machine replaces both
_SAVE, _LOAD = torch.save, torch.load
