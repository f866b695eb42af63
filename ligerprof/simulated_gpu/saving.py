"""Checkpoints of a simulated run: their memory is counted, nothing is written, and reading one gives its shapes."""

import atexit
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligerprof.runs.recording.imports import after_import_or_now

_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class Checkpoints:
    """What the program has saved instead of files."""

    def __init__(self) -> None:
        self._contents: dict[str, Any] = {}

    @property
    def paths(self) -> list[str]:
        """The files that were not written, in order."""
        return sorted(self._contents)

    def install(self) -> None:
        """Replace the functions that write and read tensors."""
        save, load = torch.save, torch.load

        def save_nothing(obj: Any, f: Any, *arguments: Any, **named: Any) -> None:
            if isinstance(f, (str, os.PathLike)):
                # what torch.save does on a GPU: one storage after another, through main memory
                self._keep(f, _in_main_memory(obj))
            else:
                save(_in_main_memory(obj, empty=True), f, *arguments, **named)

        def load_kept(f: Any, *arguments: Any, **named: Any) -> Any:
            kept = self._contents.get(_name(f)) if isinstance(f, (str, os.PathLike)) else None
            if kept is None:
                return load(f, *arguments, **named)
            target = named.get("map_location", arguments[0] if arguments else None)
            return _moved(kept, target)

        torch.save, torch.load = save_nothing, load_kept
        torch.serialization.save, torch.serialization.load = save_nothing, load_kept
        after_import_or_now("safetensors.torch", self._replace_safetensors)

    def _replace_safetensors(self, module: Any) -> None:
        load_file: Callable[..., Any] = module.load_file

        def save_file(tensors: Any, filename: Any, *_arguments: Any, **_named: Any) -> None:
            self._keep(filename, _in_main_memory(dict(tensors)))
            self._write_header(Path(filename), tensors)

        def load_kept(filename: Any, device: Any = "cpu", **named: Any) -> Any:
            kept = self._contents.get(_name(filename))
            return load_file(filename, device=device, **named) if kept is None else _moved(kept, device)

        module.save_file, module.load_file = save_file, load_kept

    def _write_header(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """A file of shapes with a hole in the place of values, which goes when the process ends."""
        if path.exists():
            return
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            kind = _SAFETENSORS_DTYPES[tensor.dtype]
            entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        with path.open("xb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + end)
        atexit.register(path.unlink, missing_ok=True)

    def _keep(self, path: Any, content: Any) -> None:
        self._contents[_name(path)] = content


def _name(path: Any) -> str:
    return str(os.path.realpath(os.fspath(path)))


def _in_main_memory(value: Any, *, empty: bool = False) -> Any:
    """Nested containers with tensors of main memory in the place of those of the GPU."""
    if isinstance(value, Tensor):
        made = torch.empty_like(value, device="cpu") if value.is_cuda else value.detach()
        return made.new_empty(0) if empty else made
    if isinstance(value, dict):
        return type(value)((key, _in_main_memory(item, empty=empty)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_in_main_memory(item, empty=empty) for item in value)
    return value


def _moved(value: Any, target: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if target is None or callable(target) else value.to(target, copy=True)
    if isinstance(value, dict):
        return type(value)((key, _moved(item, target)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_moved(item, target) for item in value)
    return value
