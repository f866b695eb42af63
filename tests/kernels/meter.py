"""Count the bytes that a call requests, from the storages that the dispatcher sees."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ByteMeter(TorchDispatchMode):
    """Live and peak requested bytes of storages that are created while it is active, except those of `known`."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._born(value.untyped_storage())
        return result

    def _born(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size_bytes = storage.nbytes()
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._died, size_bytes)

    def _died(self, size_bytes: int) -> None:
        self.live_bytes -= size_bytes
