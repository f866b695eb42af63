"""Read text, JSON and compressed data within size limits; write new files whole or not at all.

Modules that only some files need are imported when one is read: together they take longer than small files.
"""

import errno
import io
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ligerprof.errors import LigerprofError, OutputError
from ligerprof.text import printable
from ligerprof.units import GIB, MIB, format_bytes

# an argument of this name reads standard input
STANDARD_INPUT = Path("-")
_LONGEST_INPUT_BYTES = 16 * GIB
_CHUNK_BYTES = 4 * MIB
# parts of a TOML key, bare or quoted, with a dot after each
_KEY_PART = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.){0,250}"|'[^'\n]{0,250}')[ \t]*\.[ \t]*"""
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-])(?:{_KEY_PART}){{16}}")
_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileKind:
    """A kind of file to read: the type and the last sentence of its errors, and its size limit."""

    error: type[LigerprofError]
    hint: str
    max_bytes: int = 64 * 2**20


class UnpackError(Exception):
    """Compressed data that is damaged, cut short, or too large; the message is a sentence without the file's name."""


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file, for `-` a temporary copy of standard input; raises OSError for pipes, which may not end."""
    if path == STANDARD_INPUT:
        import tempfile

        with tempfile.TemporaryFile() as copy:
            _copy_standard_input(copy)
            yield copy
        return
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "a null character in its name")
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "a pipe or device, not a file")
        yield file


def _open_at_once(name: str, flags: int) -> int:
    """Open a file; a pipe without waiting for its writer."""
    return os.open(name, flags | os.O_NONBLOCK)


def _copy_standard_input(copy: IO[bytes]) -> None:
    if sys.stdin is None or sys.stdin.isatty():
        raise OSError(errno.EINVAL, "standard input is a terminal; pipe a file to it")
    source = sys.stdin.buffer
    while chunk := source.read(_CHUNK_BYTES):
        copy.write(chunk)
        if copy.tell() > _LONGEST_INPUT_BYTES:
            raise OSError(errno.EFBIG, f"standard input has more than {format_bytes(_LONGEST_INPUT_BYTES)}")
    copy.seek(0)


def unpacked(file: IO[bytes], allowed_bytes: Callable[[int], int], hint: str) -> Iterator[bytes] | None:
    """Decompress a file that starts as gzip or xz data, in chunks; None for any other file.

    Args:
        file: at its start, where it is left if the answer is None.
        allowed_bytes: the most bytes that a file of some compressed size may unpack to.
        hint: last sentence of the error about a file that unpacks to more.

    Raises:
        UnpackError: on iteration; the data is damaged, cut short or too large.
    """
    start = file.read(len(_XZ))
    file.seek(0)
    if start.startswith(_GZIP):
        import gzip

        return _chunks(gzip.GzipFile(fileobj=file), "gzip", file, allowed_bytes, hint)
    if start == _XZ:
        import lzma

        return _chunks(lzma.LZMAFile(file), "xz", file, allowed_bytes, hint)
    return None


def _chunks(
    stream: io.BufferedIOBase, kind: str, file: IO[bytes], allowed_bytes: Callable[[int], int], hint: str
) -> Iterator[bytes]:
    import lzma
    import zlib

    packed_bytes = os.fstat(file.fileno()).st_size
    most_bytes, seen_bytes = allowed_bytes(packed_bytes), 0
    try:
        while chunk := stream.read(_CHUNK_BYTES):
            seen_bytes += len(chunk)
            if seen_bytes > most_bytes:
                raise UnpackError(
                    f"the {kind} data unpacks from {format_bytes(packed_bytes)} to more than"
                    f" {format_bytes(most_bytes)}. {hint}"
                )
            yield chunk
    except EOFError:
        raise UnpackError(f"the {kind} data ends early. Was the file cut short?") from None
    except (OSError, lzma.LZMAError, zlib.error, ValueError) as error:
        raise UnpackError(f"damaged {kind} data: {printable(str(error))[:120]}.") from None


def read_text(path: Path, kind: FileKind) -> str:
    """Read a UTF-8 text file; raises `kind.error` if it is missing, unreadable, too large, or not UTF-8."""
    try:
        with opened(path) as file:
            content = file.read(kind.max_bytes + 1)
        if len(content) > kind.max_bytes:
            raise kind.error(f"{path}: larger than {format_bytes(kind.max_bytes)}. {kind.hint}")
        return content.decode("utf-8")
    except FileNotFoundError:
        raise kind.error(f"{path}: no such file. {kind.hint}") from None
    except OSError as error:
        raise kind.error(f"{path}: not readable ({error.strerror}). {kind.hint}") from None
    except UnicodeDecodeError:
        raise kind.error(f"{path}: not readable as text (it is not UTF-8). {kind.hint}") from None


def read_listed(path: Path, kind: FileKind) -> list[str]:
    """The lines of a text file without blank ones and without comments, which `#` starts; raises as `read_text`."""
    lines = (line.partition("#")[0].strip() for line in read_text(path, kind).splitlines())
    return [line for line in lines if line]


def read_json(path: Path, kind: FileKind) -> dict[str, Any]:
    """Read a file that holds one JSON object; raises `kind.error` as `read_text` and `parse_object` do."""
    return parse_object(read_text(path, kind), str(path), kind)


def parse_json(text: str, source: str, kind: FileKind) -> Any:
    """Parse JSON text; raises `kind.error` with `source`, such as a file and a line number, if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = printable(" ".join(str(error).split()))[:80]
        raise kind.error(f"{source}: not readable as JSON ({reason}). {kind.hint}") from None


def parse_object(text: str, source: str, kind: FileKind) -> dict[str, Any]:
    """Parse one JSON object, as `parse_json` does; raises `kind.error` for other JSON, too."""
    values = parse_json(text, source, kind)
    if not isinstance(values, dict):
        raise kind.error(f"{source}: not a JSON object. {kind.hint}")
    return values


def parse_toml(text: str, source: str, kind: FileKind) -> dict[str, Any]:
    """Parse TOML text; raises `kind.error` if it is not TOML, or has keys of very many parts.

    The parser takes memory in the square of a key's parts.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        if _LONG_KEY.search(text) is not None:
            raise ValueError("a key has too many parts")
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        reason = printable(" ".join(str(error).split()))[:100]
        raise kind.error(f"{source}: not readable as TOML ({reason}). {kind.hint}") from None


def is_file(path: str | Path) -> bool:
    """Whether a path is a file; False for a text that cannot be a path, where `Path.is_file` raises."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: str | Path) -> bool:
    """Whether a path is a folder; False for a text that cannot be a path, where `Path.is_dir` raises."""
    return stat.S_ISDIR(_mode(path))


def _mode(path: str | Path) -> int:
    try:
        return Path(path).stat().st_mode
    # ValueError: a null character
    except (OSError, ValueError):
        return 0


def starts_as_json(path: Path, kind: FileKind) -> bool:
    """Whether a file starts with white space and `{`, which no snapshot does; raises `kind.error` if unreadable."""
    try:
        with opened(path) as file:
            return file.read(64).lstrip()[:1] == b"{"
    except OSError as error:
        raise kind.error(f"{path}: not readable ({error.strerror}). {kind.hint}") from None


def require_absent(paths: Iterable[Path], *, force: bool, flag: str = "--force") -> None:
    """Raise OutputError if an output file exists; call this before the work that produces its content.

    Args:
        force: whether existing files are allowed.
        flag: what the error suggests adding: an option, or a library function's argument.
    """
    for path in paths:
        if not force and os.path.lexists(path):
            raise OutputError(f"{path}: exists. Add {flag} to overwrite it.")


def write_new_file(path: Path, content: bytes | str, *, force: bool = False, flag: str = "--force") -> None:
    """Write bytes, or text as UTF-8, to a file whole or not at all, and make its folder.

    The content goes to a temporary file in the same folder, which is then renamed to `path`. Without `force` a file
    that exists is never replaced, even if another process creates it meanwhile; a pipe or device never is. Raises
    OutputError if the file exists, or cannot be written; `flag` is as in `require_absent`.
    """
    partial = path.with_name(f".{path.name[:200]}.{os.urandom(4).hex()}.partial")
    try:
        # the rename would remove the device, for a superuser even /dev/null
        if path.exists() and not path.is_file() and not path.is_dir():
            raise OutputError(f"{path}: a pipe or device, not a file. Choose another place.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            # a full disk may only show itself here, before the old file is replaced
            os.fsync(file.fileno())
        if force:
            partial.replace(path)
        else:
            _take_name(partial, path)
    except FileExistsError:
        require_absent([path], force=False, flag=flag)
        raise OutputError(f"{path}: cannot be written (a parent is a file). Choose another place.") from None
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}). Choose another place.") from None
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _take_name(partial: Path, path: Path) -> None:
    """Rename a file; raises FileExistsError if `path` exists."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:
        # a file system without hard links: an exclusive create reserves the name
        path.touch(exist_ok=False)
        partial.replace(path)
