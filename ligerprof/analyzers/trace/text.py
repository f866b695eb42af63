"""Decompress a trace file in chunks of text, within size limits that real traces do not reach."""

import codecs
import gzip
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ligerprof.errors import TraceFormatError
from ligerprof.units import GIB, MIB, format_bytes

RECORD_LESS = "Record fewer steps, with schedule(active=1)."
_CHUNK_BYTES = MIB
_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
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
    except EOFError:
        raise TraceFormatError(f"{path}: the compressed data ends early. Was the file truncated?") from None
    except (OSError, lzma.LZMAError, ValueError) as error:
        raise TraceFormatError(f"{path}: cannot be read ({str(error)[:120]}).") from None
    yield decoder.decode(b"", final=True)


def _bounded(path: Path) -> Iterator[bytes]:
    packed_bytes = path.stat().st_size
    with path.open("rb") as file:
        stream = _unpacked(file)
        allowed_bytes = _LARGEST_TEXT_BYTES
        if stream is not file:
            allowed_bytes = min(allowed_bytes, max(_ALWAYS_ALLOWED_BYTES, packed_bytes * _LARGEST_EXPANSION))
        seen_bytes = 0
        while chunk := stream.read(_CHUNK_BYTES):
            seen_bytes += len(chunk)
            if seen_bytes > allowed_bytes:
                raise TraceFormatError(
                    f"{path}: {format_bytes(packed_bytes)} unpack to more than {format_bytes(allowed_bytes)} of text."
                    f" {RECORD_LESS}"
                )
            yield chunk


def _unpacked(file: IO[bytes]) -> IO[bytes]:
    start = file.read(len(_XZ))
    file.seek(0)
    if start.startswith(_GZIP):
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if start == _XZ:
        return lzma.LZMAFile(file)
    return file
