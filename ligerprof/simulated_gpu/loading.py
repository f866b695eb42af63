"""Weights of files without their values: shapes and dtypes come from headers, and no tensor of a file is read.

Weights in main memory have no values (see backend.cpp), so reading them would only take time.
"""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ligerprof.runs.recording.imports import after_import_or_now
from ligerprof.runs.recording.progress import say
from ligerprof.simulated_gpu.creation import functions
from ligerprof.simulated_gpu.stand_ins import StandIns

# as kWeightBytes in backend.cpp
WEIGHT_BYTES = 4 << 20


def install(stand_ins: StandIns) -> None:
    """Replace the functions that read weights."""
    load = torch.load

    def load_without_reading(f: Any, *arguments: Any, **named: Any) -> Any:
        # mapped tensors are read when the program computes with them or copies them in main memory
        if isinstance(f, (str, os.PathLike)) and zipfile.is_zipfile(f):
            named.setdefault("mmap", True)
        return load(f, *arguments, **named)

    torch.load = load_without_reading
    after_import_or_now("safetensors", _open_headers)
    after_import_or_now("transformers.utils.hub", stand_ins.install)
    after_import_or_now("transformers.modeling_utils", _leave_new_embeddings)
    after_import_or_now("datasets.load", _name_missing_data)


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
        return _Slice(part, _without_values(part), self._device)

    def get_tensor(self, name: str) -> Any:
        """A tensor on the file's device."""
        whole = _without_values(self._file.get_slice(name))
        return _read(self._file.get_tensor(name)) if whole is None else whole.to(self._device)


class _Slice:
    def __init__(self, part: Any, whole: torch.Tensor | None, device: Any) -> None:
        self._part, self._whole, self._device = part, whole, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> Any:
        if self._whole is None:
            return _read(self._part[index])
        return self._whole[index].to(self._device)


def _read(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a file, which has its values in main memory and takes them nowhere."""
    if tensor.is_floating_point() and tensor.device.type == "cpu":
        mark_weight(tensor)
    return tensor


def _without_values(part: Any) -> torch.Tensor | None:
    """A tensor of a slice's shape; None if its values are needed."""
    from safetensors.torch import _TYPES

    dtype = _TYPES.get(part.get_dtype())
    if dtype is None or not dtype.is_floating_point:
        return None
    whole: torch.Tensor = functions.empty(part.get_shape(), dtype=dtype, device="cpu")
    if whole.nbytes < WEIGHT_BYTES:
        return None
    mark_weight(whole)
    return whole


def _leave_new_embeddings(module: Any) -> None:
    """A resized embedding begins with the mean and the covariance of the old one, which has no values here."""
    model: Any = module.PreTrainedModel
    begin = model._init_added_embeddings_weights_with_mean

    def begin_on_gpu(self: Any, old_embeddings: Any, *arguments: Any, **named: Any) -> Any:
        if has_no_values(old_embeddings.weight):
            return None
        return begin(self, old_embeddings, *arguments, **named)

    model._init_added_embeddings_weights_with_mean = begin_on_gpu


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor in main memory comes from a file or from the GPU, or is a parameter that was drawn."""
    return tensor.device.type == "cpu" and torch.ops.simulated_gpu.is_weight(tensor)


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a weight so large that it has no values in main memory."""
    return tensor.nbytes >= WEIGHT_BYTES and is_weight(tensor)


def mark_weight(tensor: torch.Tensor) -> None:
    """Let a tensor in main memory be a weight, if it shows all of its storage."""
    torch.ops.simulated_gpu.mark_weight(tensor)


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
