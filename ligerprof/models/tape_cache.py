"""The user's cache of tapes: one file per model, settings and range of sizes, named by a hash of what decides it."""

import hashlib
import json
import lzma
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ligerprof.models.tape import FORMAT, Tape

_ENDING = ".tape"
_MOST_BYTES = 2**26


def cache_key(description: Mapping[str, Any]) -> str:
    """The name of what a tape was traced from: config, options and versions, as JSON."""
    text = json.dumps({**description, "format": FORMAT}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def find_tape(key: str, batch: int, seq: int) -> Tape | None:
    """A cached tape that covers a size; files that are not tapes are passed over."""
    for path in sorted(_folder().glob(f"{key}-*{_ENDING}")):
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError, EOFError, lzma.LZMAError):
            if path.stat().st_uid != os.getuid():
                continue
            with path.open("rb") as file:
                tape = Tape.loads(lzma.LZMADecompressor().decompress(file.read(_MOST_BYTES), _MOST_BYTES))
            if tape.covers(batch, seq):
                return tape
    return None


def keep_tape(key: str, tape: Tape) -> Tape:
    """Write a tape to the cache, and return it; a cache that cannot be written is left alone."""
    lowest, highest = zip(tape.batch, tape.seq, strict=True)
    sizes = "-".join(str(number) for number in (*lowest, *highest, tape.multiple))
    with suppress(OSError):
        _folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=_folder(), delete=False) as file:
            file.write(lzma.compress(tape.dumps(), preset=1))
        Path(file.name).replace(_folder() / f"{key}-{sizes}{_ENDING}")
    return tape


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "ligerprof", "tapes")
