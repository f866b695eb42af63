"""Damage every kind of file that is read, one after another in this process: `python -m tests.fuzzing.run FOLDER N`.

It prints one JSON object per kind with the number of inputs and of each kind of failure. A file that fails stays in the
folder, with the reason next to it.
"""

import faulthandler
import json
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from yaml import YAMLError

from ligerprof.errors import LigerprofError
from ligerprof.units import MIB
from tests.fuzzing.subjects import Subject, UnexpectedEndError, subjects
from tests.snapshots.mutations import damaged_bytes, damaged_values

MOST_SECONDS = 10
# beyond three times the unpacked bytes; the largest file unpacks to less than a MiB
MOST_BYTES = 256 * MIB
# the inputs of each kind, of 20
SHARES = {"snapshot": 7, "packed snapshot": 1, "trace": 3, "result": 3, "config": 4, "model": 1, "lengths": 1}
FAILURES = ("wrong", "traceback", "over time", "over memory", "executed", "lost")
# nothing that reads a file does any of these
EXECUTING = (
    *("exec", "compile", "pickle.find_class", "marshal.loads", "code.__new__", "subprocess.Popen"),
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.kill", "pty.spawn"),
    *("socket.connect", "socket.bind", "urllib.Request", "os.rename", "os.chmod", "os.symlink"),
)
NEIGHBOR = "neighbor.txt"


def highest_bytes() -> int:
    """Peak memory of this process; ru_maxrss would start with the parent's."""
    return 1024 * int(Path("/proc/self/status").read_text(encoding="utf-8").partition("VmHWM:")[2].split()[0])


def damaged(subject: Subject, draw: random.Random) -> bytes:
    if subject.values is None or draw.random() < 0.4:
        return damaged_bytes(subject.content, draw)
    changed = damaged_values(subject.values, draw)
    if subject.kind == "snapshot":
        return changed
    try:
        return subject.write(pickle.loads(changed))
    except (ValueError, TypeError, RecursionError, YAMLError):
        # a value that contains itself, or another that the format cannot hold
        return damaged_bytes(subject.content, draw)


class Audit:
    """Notes what the code does that reads a file, apart from imports; audit hooks cannot be removed."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event in EXECUTING and not _is_import():
            self.seen.append(f"{event}{arguments!r}"[:300])


def _is_import() -> bool:
    """Whether the code that runs belongs to an import, such as a module's own, or a dataclass's methods."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def outcome(subject: Subject, path: Path, audit: Audit | None = None) -> tuple[str, str]:
    """How the reading ended, and the traceback of a failure."""
    folder, content = path.parent, path.read_bytes()
    before = _contents(folder)
    if audit is not None:
        audit.seen.clear()
        audit.is_on = True
    end, error = _read(subject, path)
    if audit is not None:
        audit.is_on = False
        if audit.seen:
            return "executed", "\n".join(audit.seen)
    if path.read_bytes() != content or _contents(folder) != before:
        return "lost", f"{sorted(before)} became {sorted(_contents(folder))}"
    return end, "" if error is None else "".join(traceback.format_exception(error))


def _contents(folder: Path) -> dict[str, int]:
    return {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(folder)}


def _read(subject: Subject, path: Path) -> tuple[str, Exception | None]:
    """How the reading ended, and the error that is a failure; formatting it would compile its lines."""
    started = time.process_time()
    try:
        ended = "answered" if subject.read(path) else "refused"
    except LigerprofError as error:
        ended = "refused" if "\n" not in str(error) else "wrong"
    except UnexpectedEndError as error:
        return "wrong", error
    except Exception as error:  # the failure that is counted
        return "traceback", error
    return ("over time" if time.process_time() - started > MOST_SECONDS else ended), None


def run(kind: str, count: int, folder: Path, audit: Audit | None = None) -> Counter[str]:
    (folder / NEIGHBOR).write_text("kept", encoding="utf-8")
    ends: Counter[str] = Counter(dict.fromkeys(FAILURES, 0))
    unharmed = 0
    found = [subject for subject in subjects() if subject.kind == kind]
    for number in range(count):
        subject = found[number % len(found)]
        path = folder / f"{kind.replace(' ', '-')}-{number}{subject.suffix}"
        if number < len(found):
            path.write_bytes(subject.content)
            end, reason = outcome(subject, path)
            assert end == "answered", f"{subject.kind} {number}: {end} {reason}"
            unharmed = highest_bytes()
        path.write_bytes(damaged(subject, random.Random(f"{kind} {number}")))
        # a file that takes far too long ends the process with a traceback
        signal.setitimer(signal.ITIMER_VIRTUAL, 3 * MOST_SECONDS)
        end, reason = outcome(subject, path, audit)
        if highest_bytes() - unharmed > MOST_BYTES:
            end = "over memory"
            unharmed = highest_bytes()
        ends[end] += 1
        if end in FAILURES:
            path.with_suffix(".reason").write_text(f"{end}\n{reason}", encoding="utf-8")
        else:
            path.unlink()
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return ends


def main(folder: Path, count: int) -> int:
    """Run the inputs of all kinds; returns the number of failures."""
    faulthandler.register(signal.SIGVTALRM, chain=True)
    os.environ["COLUMNS"] = "80"
    failures, audit = 0, Audit()
    for kind, share in SHARES.items():
        started = time.process_time()
        ends = run(kind, count * share // sum(SHARES.values()), folder, audit)
        failures += sum(ends[end] for end in FAILURES)
        seconds = round(time.process_time() - started, 1)
        print(json.dumps({"kind": kind, "inputs": sum(ends.values()), **ends, "seconds": seconds}), flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(min(100, main(Path(sys.argv[1]), int(sys.argv[2]))))
