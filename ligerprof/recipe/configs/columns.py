"""Find the columns of the data sets that a file names and that lie on this machine."""

import csv
import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ligerprof.files import is_file, is_folder, opened

_MOST_BYTES = 2**20
_MOST_FILES, _MOST_FOLDERS = 1000, 100
_SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json", ".csv")
_NAMES_DATA = re.compile(
    r"(train(ing)?_)?(data|dataset)s?(_(name|name_or_path|id_or_path|path|dir|files?|file_path|mixer|mixer_list|mixture))?"
    r"|train_(files?|path)"
)
# in an entry of a list of data sets
_NAMES_ENTRY = frozenset({"path", "id", "name_or_path", "data_dir", "data_files", "dataset", "dataset_name", "train"})
_NAMES_COLUMNS = frozenset({"columns", "dataset_columns"})


def columns_named_in(values: Mapping[str, Any], file: str) -> Iterator[tuple[str, frozenset[str]]]:
    """The columns of each data set that a configuration names, with the key that names it.

    A configuration may list columns itself. Data sets of other machines and of the hub, and files in a format that
    cannot be read here, are left out.
    """
    for key, value in values.items():
        for listed in _listed_columns(key, value):
            yield key, listed
        if _NAMES_DATA.fullmatch(key):
            for name in _names(value):
                if (columns := _columns_of(name, file)) is not None:
                    yield key, columns


def _listed_columns(key: str, value: Any) -> Iterator[frozenset[str]]:
    if key in _NAMES_COLUMNS and isinstance(value, list):
        yield frozenset(map(str, value))
    elif isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _listed_columns(str(inner), item)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, Mapping):
                yield from _listed_columns("", item)


def _names(value: Any) -> Iterator[str]:
    """Names of data sets in the value of a key: a name, a list, a mapping from names to shares, or objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _names(item)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if isinstance(item, (int, float)):
                yield str(name)
            elif name in _NAMES_ENTRY or _NAMES_DATA.fullmatch(str(name)):
                yield from _names(item)


def _columns_of(name: str, file: str) -> frozenset[str] | None:
    """The columns of a data set in this folder or in that of the file that names it."""
    for folder in (Path(), Path(file).parent):
        path = folder / Path(name).expanduser() if name and name.isprintable() else None
        if path is not None and is_file(path):
            return _of_file(path)
        if path is not None and is_folder(path):
            return _of_folder(path)
    return None


def _of_folder(folder: Path) -> frozenset[str] | None:
    """The columns of a folder's files, of the split `train` if there is one; None if they differ."""
    for described in (folder / "dataset_info.json", folder / "train" / "dataset_info.json"):
        # `save_to_disk` of datasets writes it
        if is_file(described) and isinstance(features := (_first_object(described) or {}).get("features"), Mapping):
            return frozenset(features)
    found = [path for path in islice(_files(folder), _MOST_FILES) if path.suffix.lower() in _SUFFIXES]
    chosen = [path for path in found if "train" in str(path.relative_to(folder)).lower()] or found
    columns = {_of_file(path) for path in (*chosen[:1], *chosen[-1:])}
    return columns.pop() if len(columns) == 1 else None


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in islice(os.walk(folder), _MOST_FOLDERS):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent) / name for name in sorted(names) if not name.startswith((".", "dataset_", "state")))


def _of_file(path: Path) -> frozenset[str] | None:
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".arrow"):
        return _of_table(path)
    if suffix == ".csv":
        return frozenset(next(csv.reader(_head(path).splitlines()[:1]), ())) or None
    row = _first_object(path) if suffix in (".json", ".jsonl") else None
    return None if row is None else frozenset(row)


def _head(path: Path) -> str:
    try:
        with opened(path) as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _first_object(path: Path) -> Mapping[str, Any] | None:
    """The first object of a JSON file: of an array, of lines, or the only one."""
    try:
        first, _ = json.JSONDecoder().raw_decode(_head(path).lstrip("\ufeff \t\r\n["))
    except (ValueError, RecursionError):
        return None
    return first if isinstance(first, Mapping) else None


def _of_table(path: Path) -> frozenset[str] | None:
    """The columns of a parquet or arrow file; None without pyarrow."""
    try:
        import pyarrow as pa
        from pyarrow import ipc, parquet
    except ImportError:
        return None
    try:
        if path.suffix.lower() == ".parquet":
            return frozenset(parquet.read_schema(path).names)
        with pa.memory_map(str(path)) as source:
            return frozenset(ipc.open_stream(source).schema.names)
    except (OSError, ValueError):
        return None
