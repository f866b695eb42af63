"""Read text and JSON within a size limit; write new files whole or not at all."""

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
    """A kind of file to read: the type and the last sentence of its errors, and its size limit."""

    error: type[LigerprofError]
    hint: str
    max_bytes: int = 64 * 2**20


def read_text(path: Path, kind: FileKind) -> str:
    """Read a UTF-8 text file; raises `kind.error` if it is missing, unreadable, too large, or not UTF-8."""
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
    """Read a file that holds one JSON object; raises `kind.error` as `read_text` and `parse_object` do."""
    return parse_object(read_text(path, kind), str(path), kind)


def parse_json(text: str, source: str, kind: FileKind) -> Any:
    """Parse JSON text; raises `kind.error` if it is not JSON.

    Args:
        source: the text's origin for errors, such as a file and a line number.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:80]
        raise kind.error(f"{source}: not readable as JSON ({reason}). {kind.hint}") from None


def parse_object(text: str, source: str, kind: FileKind) -> dict[str, Any]:
    """Parse one JSON object, as `parse_json` does; raises `kind.error` for other JSON, too."""
    values = parse_json(text, source, kind)
    if not isinstance(values, dict):
        raise kind.error(f"{source}: not a JSON object. {kind.hint}")
    return values


def starts_as_json(path: Path, kind: FileKind) -> bool:
    """Whether a file starts with white space and `{`, which no snapshot does; raises `kind.error` if unreadable."""
    try:
        with path.open("rb") as file:
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
    that exists is never replaced, even if another process creates it meanwhile.

    Raises:
        OutputError: the file exists, or cannot be written; `flag` is as in `require_absent`.
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
    """Rename a file; raises FileExistsError if `path` exists."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:
        # a file system without hard links: an exclusive create reserves the name
        path.touch(exist_ok=False)
        partial.replace(path)
