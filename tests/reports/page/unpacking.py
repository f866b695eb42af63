"""Read a page's data back, as plainly as possible."""

import base64
import json
import re
import zlib
from typing import Any


def recordings_of(page: str) -> list[dict[str, Any]]:
    """The data of each recording of a page, with columns as lists of integers."""
    texts = re.findall(r'<script type="application/octet-stream" id="recording-\d+">([^<]*)</script>', page)
    return [unpack(text) for text in texts]


def unpack(text: str) -> dict[str, Any]:
    """The data of one recording."""
    whole = zlib.decompress(base64.b64decode(text, validate=True))
    length = int.from_bytes(whole[:4], "little")
    values = _with_columns(json.loads(whole[4 : 4 + length]), whole[4 + length :])
    assert isinstance(values, dict)
    return values


def _with_columns(values: Any, data: bytes) -> Any:
    if isinstance(values, dict) and set(values) == {"at", "count"}:
        return _column(data, values["at"], values["count"])
    if isinstance(values, dict):
        return {key: _with_columns(value, data) for key, value in values.items()}
    if isinstance(values, list):
        return [_with_columns(value, data) for value in values]
    return values


def _column(data: bytes, at: int, count: int) -> list[int]:
    column: list[int] = []
    for _ in range(count):
        value, shift = 0, 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        difference = -(value + 1) // 2 if value % 2 else value // 2
        column.append((column[-1] if column else 0) + difference)
    return column
