"""Decompress a trace file in chunks of text, within size limits that real traces do not reach."""

import codecs
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ligerprof.errors import TraceFormatError
from ligerprof.files import UnpackError, opened, unpacked
from ligerprof.text import printable
from ligerprof.units import GIB, MIB, format_bytes

RECORD_LESS = "Record fewer steps, with schedule(active=1)."
_CHUNK_BYTES = MIB
_LARGEST_TEXT_BYTES = 4 * GIB
# traces compress 15 to 30 times, repetitive ones a few hundred times with xz
_LARGEST_EXPANSION = 500
_ALWAYS_ALLOWED_BYTES = 64 * MIB


def text_chunks(path: Path) -> Iterator[str]:
    """Yield the text of a trace, plain or compressed; the first bytes distinguish gzip and xz.

    Invalid UTF-8, which kernel names can contain, becomes replacement characters.

    Raises:
        TraceFormatError: the file is unreadable, damaged, truncated or too large.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    try:
        yield from map(decoder.decode, _bounded(path))
    except UnpackError as error:
        raise TraceFormatError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        raise TraceFormatError(f"{path}: cannot be read ({printable(str(error))[:120]}).") from None
    yield decoder.decode(b"", final=True)


def _bounded(path: Path) -> Iterator[bytes]:
    with opened(path) as file:
        chunks = unpacked(file, _allowed_bytes, RECORD_LESS)
        if chunks is not None:
            yield from chunks
            return
        seen_bytes = 0
        for chunk in iter(partial(file.read, _CHUNK_BYTES), b""):
            seen_bytes += len(chunk)
            if seen_bytes > _LARGEST_TEXT_BYTES:
                raise TraceFormatError(f"{path}: more than {format_bytes(_LARGEST_TEXT_BYTES)} of text. {RECORD_LESS}")
            yield chunk


def _allowed_bytes(packed_bytes: int) -> int:
    return min(_LARGEST_TEXT_BYTES, max(_ALWAYS_ALLOWED_BYTES, packed_bytes * _LARGEST_EXPANSION))
