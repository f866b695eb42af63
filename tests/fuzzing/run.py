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

from ligerprof.errors import LigerprofError
from ligerprof.units import MIB
from tests.fuzzing.subjects import Subject, UnexpectedEndError, subjects
from tests.snapshots.mutations import damaged_bytes, damaged_values

MOST_SECONDS = 10
# beyond three times the unpacked bytes; the largest file unpacks to less than a MiB
MOST_BYTES = 256 * MIB
# the inputs of each kind, of 20
SHARES = {"snapshot": 8, "packed snapshot": 2, "trace": 4, "result": 3, "config": 3}
FAILURES = ("wrong", "traceback", "over time", "over memory")


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
        return json.dumps(pickle.loads(changed)).encode()
    except (ValueError, TypeError, RecursionError):
        # a value that contains itself, which JSON cannot hold
        return damaged_bytes(subject.content, draw)


def outcome(subject: Subject, path: Path) -> tuple[str, str]:
    """How the reading ended, and the traceback of a failure."""
    started = time.process_time()
    try:
        ended = "answered" if subject.read(path) else "refused"
    except LigerprofError as error:
        ended = "refused" if "\n" not in str(error) else "wrong"
    except UnexpectedEndError:
        return "wrong", traceback.format_exc()
    except Exception:  # the failure that is counted
        return "traceback", traceback.format_exc()
    return ("over time" if time.process_time() - started > MOST_SECONDS else ended), ""


def run(kind: str, count: int, folder: Path) -> Counter[str]:
    ends: Counter[str] = Counter(dict.fromkeys(FAILURES, 0))
    unharmed = 0
    found = [subject for subject in subjects() if subject.kind == kind]
    for number in range(count):
        subject = found[number % len(found)]
        path = folder / f"{kind.replace(' ', '-')}-{number}{subject.suffix}"
        if number < len(found):
            path.write_bytes(subject.content)
            end, reason = outcome(subject, path)
            assert end == "answered", f"{subject}: {reason}"
            unharmed = highest_bytes()
        path.write_bytes(damaged(subject, random.Random(f"{kind} {number}")))
        # a file that takes far too long ends the process with a traceback
        signal.setitimer(signal.ITIMER_VIRTUAL, 3 * MOST_SECONDS)
        end, reason = outcome(subject, path)
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
    failures = 0
    for kind, share in SHARES.items():
        started = time.process_time()
        ends = run(kind, count * share // sum(SHARES.values()), folder)
        failures += sum(ends[end] for end in FAILURES)
        seconds = round(time.process_time() - started, 1)
        print(json.dumps({"kind": kind, "inputs": sum(ends.values()), **ends, "seconds": seconds}), flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(min(100, main(Path(sys.argv[1]), int(sys.argv[2]))))
