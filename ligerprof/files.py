"""How files are read and written: text and JSON within a size limit, and new files whole or not at all."""

import json
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligerprof.errors import LigerprofError, OutputError
from ligerprof.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FileKind:
    """A kind of file to read, and how errors about it read.

    Attributes:
        error: the type of every error about such a file.
        hint: what to give instead; the last sentence of every error.
        max_bytes: larger files are refused.
    """

    error: type[LigerprofError]
    hint: str
    max_bytes: int = 64 * 2**20


def read_text(path: Path, kind: FileKind) -> str:
    """Read a UTF-8 text file.

    Raises:
        LigerprofError: of `kind.error`; the file is missing, unreadable, too large, or not UTF-8.
    """
    try:
        with path.open("rb") as file:
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


def read_json(path: Path, kind: FileKind) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        LigerprofError: of `kind.error`; as `read_text`, or the content is not a JSON object.
    """
    return parse_object(read_text(path, kind), str(path), kind)


def parse_json(text: str, source: str, kind: FileKind) -> Any:
    """Parse JSON text.

    Args:
        source: the name that errors give, such as a file and a line number.

    Raises:
        LigerprofError: of `kind.error`; the text is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:80]
        raise kind.error(f"{source}: not readable as JSON ({reason}). {kind.hint}") from None


def parse_object(text: str, source: str, kind: FileKind) -> dict[str, Any]:
    """Parse text that holds one JSON object; the arguments and errors are `parse_json`'s."""
    values = parse_json(text, source, kind)
    if not isinstance(values, dict):
        raise kind.error(f"{source}: not a JSON object. {kind.hint}")
    return values


def starts_as_json(path: Path, kind: FileKind) -> bool:
    """Whether a file begins with `{`, after white space. A snapshot never does, compressed or not.

    Raises:
        LigerprofError: of `kind.error`; the file is unreadable.
    """
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip()[:1] == b"{"
    except OSError as error:
        raise kind.error(f"{path}: not readable ({error.strerror}). {kind.hint}") from None


def require_absent(paths: Iterable[Path], *, force: bool, flag: str = "--force") -> None:
    """Refuse files that exist, before the work whose results would go into them.

    Args:
        force: allow them.
        flag: what the error suggests adding; library functions name their argument.

    Raises:
        OutputError: one of them exists.
    """
    for path in paths:
        if not force and os.path.lexists(path):
            raise OutputError(f"{path}: exists. Add {flag} to overwrite it.")


def write_new_file(path: Path, content: bytes | str, *, force: bool = False, flag: str = "--force") -> None:
    """Write a file whole or not at all, and make its folder.

    The content goes to a temporary file in the same folder, which then takes the name `path`. A file that
    another process creates under that name meanwhile is never overwritten without `force`.

    Args:
        content: bytes, or text to encode as UTF-8.
        force: replace a file that exists.
        flag: as in `require_absent`.

    Raises:
        OutputError: the file exists, or cannot be written.
    """
    partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
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
    """Give a file the name `path` unless another has it; FileExistsError says that one does."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:
        # a file system without hard links: an exclusive create reserves the name
        path.touch(exist_ok=False)
        partial.replace(path)
