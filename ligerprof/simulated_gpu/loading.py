"""Weights of files without their values: shapes and dtypes come from headers, and no tensor of a file is read.

Large tensors of floats in main memory have no values (see backend.cpp), so reading them would only take time.
"""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ligerprof.errors import UnsupportedError
from ligerprof.runs.recording.imports import after_import_or_now
from ligerprof.runs.recording.messages import say
from ligerprof.simulated_gpu.stand_ins import StandIns
from ligerprof.simulated_gpu.values import place
from ligerprof.units import format_bytes

# as kWeightBytes in backend.cpp
WEIGHT_BYTES = 4 << 20


def install(stand_ins: StandIns) -> None:
    """Replace the functions that read weights."""
    load = torch.load

    def load_without_reading(f: Any, *arguments: Any, **named: Any) -> Any:
        # mapped tensors are read when they are copied, and large ones are not copied
        if isinstance(f, (str, os.PathLike)) and zipfile.is_zipfile(f):
            named.setdefault("mmap", True)
        return load(f, *arguments, **named)

    torch.load = load_without_reading
    after_import_or_now("safetensors", _open_headers)
    after_import_or_now("transformers.utils.hub", stand_ins.install)
    after_import_or_now("transformers.modeling_utils", _leave_new_embeddings)
    after_import_or_now("datasets.load", _name_missing_data)
    register_optimizer_step_pre_hook(_Updates().check)


def _open_headers(module: Any) -> None:
    module.safe_open = _opened_by(module.safe_open)


def _opened_by(safe_open: Callable[..., Any]) -> Callable[..., Any]:
    def opened(filename: Any, framework: str = "pt", device: Any = "cpu", **named: Any) -> Any:
        file = safe_open(filename, framework=framework, device=device, **named)
        return _Weights(file, device) if framework in ("pt", "torch", "pytorch") else file

    return opened


class _Weights:
    """A safetensors file whose large tensors of floats are made from the header."""

    def __init__(self, file: Any, device: Any) -> None:
        self._file, self._device = file, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_Weights":
        self._file.__enter__()
        return self

    def __exit__(self, *arguments: Any) -> None:
        self._file.__exit__(*arguments)

    def get_slice(self, name: str) -> Any:
        """A part of a tensor, as safetensors has it."""
        part = self._file.get_slice(name)
        whole = _without_values(part)
        return part if whole is None else _Slice(part, whole, self._device)

    def get_tensor(self, name: str) -> Any:
        """A tensor on the file's device."""
        whole = _without_values(self._file.get_slice(name))
        return self._file.get_tensor(name) if whole is None else whole.to(self._device)


class _Slice:
    def __init__(self, part: Any, whole: torch.Tensor, device: Any) -> None:
        self._part, self._whole, self._device = part, whole, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> Any:
        return self._whole[index].to(self._device)


def _without_values(part: Any) -> torch.Tensor | None:
    """A tensor of a slice's shape; None if its values are needed."""
    from safetensors.torch import _TYPES

    dtype = _TYPES.get(part.get_dtype())
    if dtype is None or not dtype.is_floating_point:
        return None
    whole = torch.empty(part.get_shape(), dtype=dtype, device="cpu")
    return whole if has_no_values(whole) else None


def _leave_new_embeddings(module: Any) -> None:
    """A resized embedding begins with the mean and the covariance of the old one, which has no values here."""
    model: Any = module.PreTrainedModel
    begin = model._init_added_embeddings_weights_with_mean

    def begin_on_gpu(self: Any, old_embeddings: Any, *arguments: Any, **named: Any) -> Any:
        if has_no_values(old_embeddings.weight):
            return None
        return begin(self, old_embeddings, *arguments, **named)

    model._init_added_embeddings_weights_with_mean = begin_on_gpu


class _Updates:
    """Optimizers that would update weights in main memory, which have no values."""

    def __init__(self) -> None:
        self._checked: WeakSet[torch.optim.Optimizer] = WeakSet()

    def check(self, optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
        """Refuse a step on the CPU."""
        if optimizer in self._checked:
            return
        self._checked.add(optimizer)
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if has_no_values(weight)]
        if weights:
            size = format_bytes(sum(weight.nbytes for weight in weights))
            raise UnsupportedError(
                f"{place()}: {type(optimizer).__name__} updates {size} of weights in main memory, which have no values"
                " in a simulated run. Move them to the GPU, or run on one."
            )


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor in main memory is so large that it has no values."""
    return tensor.device.type == "cpu" and tensor.is_floating_point() and tensor.nbytes >= WEIGHT_BYTES


def _name_missing_data(module: Any) -> None:
    load_dataset = module.load_dataset

    def load(path: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return load_dataset(path, *arguments, **named)
        except (OSError, ValueError, RuntimeError) as error:
            if not Path(str(path)).exists():
                say(f"the data set {path} is not on this machine, and a simulated run uses no network ({error})")
            raise

    module.load_dataset = load
