"""Checkpoints of a simulated run: files with descriptions of tensors, and with values only where they are known.

A file of torch.save holds what it would hold on a GPU but for the content of storages, and all processes of the command
can read it. A file of safetensors has a header, and a hole in the place of values. Both have the size of the file on a
GPU, and like every new file of a simulated run, they go when it has ended (`files.py`).
"""

import ctypes
import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligerprof.errors import UnsupportedError
from ligerprof.runs.recording.imports import after_import_or_now
from ligerprof.simulated_gpu.files import Files
from ligerprof.simulated_gpu.loading import WEIGHT_BYTES, has_no_values, mark_weight
from ligerprof.simulated_gpu.plans import functions
from ligerprof.simulated_gpu.values import Values, place

_MARK = b"ligerprof: a checkpoint of a simulated run\n"
# holes in files that are smaller are copied
_MOST_BYTES = 4 << 20


class Checkpoints:
    """What the program saves and loads.

    Args:
        values: the values that are known on the GPU.
        files: the files of this process.
        synchronize: waits for a stream of the GPU, as copies to main memory do; -1 for all.
    """

    def __init__(self, values: Values, files: Files | None, synchronize: Callable[[int], None]) -> None:
        self._values, self._files, self._synchronize = values, files, synchronize

    def install(self) -> None:
        """Replace the functions that write and read tensors."""
        load, copy_file = torch.load, shutil.copyfile

        def save(obj: Any, f: Any, pickle_module: Any = pickle, *_arguments: Any, **_named: Any) -> None:
            if isinstance(f, (str, os.PathLike)):
                with Path(f).open("wb") as file:
                    self._write(obj, file, pickle_module)
            else:
                self._write(obj, f, pickle_module)

        def load_described(
            f: Any, map_location: Any = None, pickle_module: Any = None, *arguments: Any, **named: Any
        ) -> Any:
            if not isinstance(f, (str, os.PathLike)):
                before = f.tell()
                if f.read(len(_MARK)) == _MARK:
                    return self._read(f, map_location, pickle_module)
                f.seek(before)
                return load(f, map_location, pickle_module, *arguments, **named)
            with Path(f).open("rb") as file:
                if file.read(len(_MARK)) == _MARK:
                    return self._read(file, map_location, pickle_module)
            return load(self._where(f), map_location, pickle_module, *arguments, **named)

        def copy(source: Any, target: Any, **named: Any) -> Any:
            return target if _copied_with_holes(source, target) else copy_file(source, target, **named)

        torch.save = torch.serialization.save = save
        torch.load = torch.serialization.load = load_described
        tools: Any = shutil
        tools.copyfile = copy
        after_import_or_now("safetensors", self._replace_opening)
        after_import_or_now("safetensors.torch", self._replace_saving)
        after_import_or_now("tokenizers", self._replace_tokenizers)

    def _where(self, path: Any) -> Any:
        return path if self._files is None else self._files.where(path)

    # torch.save and torch.load

    def _write(self, obj: Any, file: Any, pickle_module: Any) -> None:
        described: dict[int, Any] = {}
        size_bytes = 0

        def persistent_id(_pickler: Any, value: Any) -> Any:
            nonlocal size_bytes
            if not torch.is_storage(value):
                return None
            dtype = getattr(value, "dtype", torch.uint8)
            storage = getattr(value, "_untyped_storage", value)
            key = storage._cdata
            if key in described:
                return "storage", key, dtype, None
            # alive until the end, so that no other gets its number
            described[key] = storage
            size_bytes += storage.nbytes()
            location = torch.serialization.location_tag(storage)
            return "storage", key, dtype, (location, storage.nbytes(), *self._content(storage))

        pickler = type("_Pickler", (pickle_module.Pickler,), {"persistent_id": persistent_id})
        file.write(_MARK + self._secret())
        pickler(file, protocol=4).dump(obj)
        if any(storage.device.type == "cuda" for storage in described.values()):
            self._synchronize(-1)
        # the pickler's class, a cycle, keeps the table until the next garbage collection
        described.clear()
        with suppress(OSError, AttributeError, ValueError):
            if file.seekable() and os.fstat(file.fileno()):
                file.truncate(file.tell() + size_bytes)

    def _secret(self) -> bytes:
        """A file with another one is not of this run, and is not read: it is a pickle."""
        return b"0" * 32 if self._files is None else self._files.secret

    def _content(self, storage: Any) -> tuple[bytes | None, bool]:
        """The values of a storage, and whether they are made up; None if there are none."""
        made_up = False
        if storage.device.type == "cuda":
            known = self._values.known_at(storage.data_ptr())
            if known is None:
                return None, False
            storage, made_up = known
        elif has_no_values(torch.empty(0, dtype=torch.uint8).set_(storage)):
            return None, False
        if storage.device.type != "cpu" or not storage.nbytes():
            return None, False
        return ctypes.string_at(storage.data_ptr(), storage.nbytes()), made_up

    def _read(self, file: Any, map_location: Any, pickle_module: Any) -> Any:
        if file.read(32) != self._secret():
            raise UnsupportedError(
                f"{place()}: {getattr(file, 'name', 'a checkpoint')} was saved by another simulated run and holds no"
                " values. Save it without a simulation."
            )
        loaded: dict[int, torch.UntypedStorage] = {}

        def persistent_load(_unpickler: Any, description: Any) -> Any:
            _, key, dtype, content = description
            if key not in loaded:
                loaded[key] = self._made(content, map_location)
            storage_type: Any = torch.storage.TypedStorage
            return storage_type(wrap_storage=loaded[key], dtype=dtype, _internal=True)

        base = (pickle_module or pickle).Unpickler
        try:
            return type("_Unpickler", (base,), {"persistent_load": persistent_load})(file).load()
        finally:
            # as in _write
            loaded.clear()

    def _made(self, described: tuple[str, int, bytes | None, bool], map_location: Any) -> torch.UntypedStorage:
        location, size_bytes, content, made_up = described
        host = functions.zeros(size_bytes, dtype=torch.uint8)
        if content:
            host.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        elif size_bytes >= WEIGHT_BYTES:
            mark_weight(host)
        if callable(map_location):
            found = map_location(host.untyped_storage(), location)
            if found is not None:
                return getattr(found, "_untyped_storage", found)  # type: ignore[no-any-return]
        elif isinstance(map_location, dict):
            location = str(map_location.get(location, location))
        elif map_location is not None:
            location = str(map_location)
        if location == "cpu":
            return host.untyped_storage()
        tensor = functions.empty(size_bytes, dtype=torch.uint8, device=location)
        if content and tensor.is_cuda:
            self._values.set(tensor, host, made_up=made_up)
        return tensor.untyped_storage()

    # safetensors, and other packages that are not Python

    def _replace_opening(self, module: Any) -> None:
        opened = module.safe_open
        module.safe_open = lambda filename, *arguments, **named: opened(self._where(filename), *arguments, **named)

    def _replace_saving(self, module: Any) -> None:
        names = {dtype: name for name, dtype in module._TYPES.items()}

        def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
            header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
            end = 0
            for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
                begin, end = end, end + tensor.numel() * tensor.element_size()
                kind, shape = names[tensor.dtype], list(tensor.shape)
                header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            # safetensors copies all tensors to main memory before it writes
            moved = [tensor for tensor in tensors.values() if tensor.is_cuda]
            copies = [functions.empty(tensor.shape, dtype=tensor.dtype) for tensor in moved]
            if moved:
                self._synchronize(-1)
            with Path(filename).open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for name, tensor in tensors.items():
                    content = self._content_of(tensor)
                    if content:
                        file.seek(8 + len(text) + header[name]["data_offsets"][0])
                        file.write(content)
                file.truncate(8 + len(text) + end)
            del copies

        module.save_file = save_file

    def _content_of(self, tensor: Tensor) -> bytes | None:
        found = self._values.copy_of(tensor) if tensor.is_cuda else tensor.detach()
        if found is None or has_no_values(found):
            return None
        found = found.contiguous()
        return ctypes.string_at(found.data_ptr(), found.numel() * found.element_size())

    def _replace_tokenizers(self, module: Any) -> None:
        """Their own code writes files."""
        kind = module.Tokenizer
        save = kind.save
        if self._files is not None:
            to_write = self._files.where_to_write
            kind.save = lambda tokenizer, path, *arguments, **named: save(
                tokenizer, str(to_write(path)), *arguments, **named
            )


def _copied_with_holes(source: Any, target: Any) -> bool:
    """Copy a file with a hole in the place of values; False if it is not one."""
    if not isinstance(source, (str, os.PathLike)) or not Path(source).is_file():
        return False
    found = Path(source).stat()
    if found.st_blocks * 512 + _MOST_BYTES > found.st_size:
        return False
    with Path(source).open("rb") as reads, Path(target).open("wb") as writes:
        end = 0
        with suppress(OSError):
            while True:
                begin = os.lseek(reads.fileno(), end, os.SEEK_DATA)
                end = os.lseek(reads.fileno(), begin, os.SEEK_HOLE)
                os.copy_file_range(reads.fileno(), writes.fileno(), end - begin, begin, begin)
        writes.truncate(found.st_size)
    return True
