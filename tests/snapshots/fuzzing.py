"""Read one damaged snapshot after another in a separate process: `python -m tests.snapshots.fuzzing FOLDER KIND N`.

It measures its own memory, prints its stack if it hangs, and leaves a file that fails in the folder.
"""

import faulthandler
import json
import pickle
import pickletools
import random
import reprlib
import signal
import sys
import time
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from ligerprof.analyzers.explain.analysis import analyze, explain
from ligerprof.analyzers.explain.peak import diff_peaks
from ligerprof.errors import LigerprofError, SnapshotFormatError
from ligerprof.reports.page.peak import render_peak_page
from ligerprof.reports.peak import render_peak
from ligerprof.reports.terminal import console
from ligerprof.roles import View
from ligerprof.snapshots.pickles import load_snapshot_data
from ligerprof.snapshots.reader import Snapshot, read_snapshot
from tests.snapshots.mutations import PROTOCOLS, damaged_bytes, damaged_values, holders, originals

MOST_SECONDS, SPARE_KIB = 5, 64 * 1024
SHOWN_EVERY = 10
PUTS = ("BINPUT", "LONG_BINPUT")
SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxdict, SHORT.maxlist, SHORT.maxstring, SHORT.maxother = 4, 50, 50, 200, 200


def answer(path: Path) -> bool:
    """Whether the file has a report; otherwise there must be one error."""
    try:
        report = explain(path)
    except LigerprofError as error:
        complaint = str(error)
    else:
        complaint = ""
    assert "\n" not in complaint, complaint
    if complaint:
        return False
    assert report.roles.total_bytes == report.peak_bytes
    json.dumps(report.to_json(), allow_nan=False)
    return True


def show(path: Path) -> None:
    """Render the page with its timeline, the diff with itself, and every table."""
    try:
        analysis = analyze(path)
    except LigerprofError:
        return
    report = analysis.peak
    render_peak_page(analysis, source="damaged").encode()
    json.dumps(diff_peaks(report, report).to_json(), allow_nan=False)
    for view in View:
        console(StringIO()).print(render_peak(report, by=view, top=10))


def compare(path: Path) -> bool:
    """Whether pickle loads the file; the fast path must then give the same events."""
    whole = path.read_bytes()
    try:
        plain = Snapshot.from_dict(
            load_snapshot_data(lambda: np.frombuffer(bytearray(whole), dtype=np.uint8), fast=False)
        )
    except SnapshotFormatError:
        return False
    if not is_ordinary(plain, whole):
        return False
    assert rows(read_snapshot(path)) == rows(plain)
    return True


def is_ordinary(snapshot: Snapshot, whole: bytes) -> bool:
    """Whether each event occurs once and each memo entry is written once, as in every recording.

    Otherwise, events read from the bytes may differ from those that pickle loads.
    """
    held = Counter(
        id(item)
        for holder in holders([*map(list, snapshot.device_traces), *snapshot.segments])
        for item in (holder.values() if isinstance(holder, dict) else holder)
        if isinstance(item, dict) and "action" in item
    )
    return max(held.values(), default=1) == 1 and max(memo_writes(whole).values(), default=1) == 1


def memo_writes(whole: bytes) -> Counter[int]:
    """Number of writes to each memo entry; MEMOIZE writes the entry after the last."""
    written: Counter[int] = Counter()
    for opcode, argument, _ in pickletools.genops(whole):
        if opcode.name in PUTS:
            written[argument] += 1
        elif opcode.name == "MEMOIZE":
            written[len(written)] += 1
    return written


def rows(snapshot: Snapshot) -> list[str]:
    """Every event as text, since NaN differs from itself; of bounded depth, since values may contain themselves."""
    return [SHORT.repr(dict(event)) for trace in snapshot.device_traces for event in trace]


def highest_kib() -> int:
    """Peak memory of this process; ru_maxrss would start with the parent's."""
    return int(Path("/proc/self/status").read_text(encoding="utf-8").partition("VmHWM:")[2].split()[0])


def damage(values: dict[str, Any], kind: str, draw: random.Random) -> bytes:
    if kind == "values":
        return damaged_values(values, draw)
    return damaged_bytes(pickle.dumps(values, draw.choice(PROTOCOLS)), draw)


def main(folder: Path, kind: str, count: int) -> None:
    # a file that takes too much processor time ends the process with a traceback
    faulthandler.register(signal.SIGVTALRM, chain=True)
    path = folder / "whole.pickle"
    # pickled and loaded again, so that equal values share an object only if they do in a file
    wholes = [pickle.loads(pickle.dumps(values)) for values in originals().values()]
    for whole in wholes:
        path.write_bytes(pickle.dumps(whole))
        assert answer(path)
        show(path)
        assert compare(path)
    path.unlink()
    unharmed_kib = highest_kib()
    slowest, answers, compared = 0.0, 0, 0
    for number in range(count):
        path = folder / f"{kind}-{number}.pickle"
        path.write_bytes(damage(wholes[number % len(wholes)], kind, random.Random(f"{kind} {number}")))
        signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
        started = time.process_time()
        answers += answer(path)
        slowest = max(slowest, time.process_time() - started)
        if number % SHOWN_EVERY == 0:
            show(path)
        compared += compare(path)
        path.unlink()
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    print(f"{answers} of {count} answered, {compared} compared, slowest {slowest:.2f} s, {highest_kib()} KiB")
    assert 0 < answers < count
    assert compared > count / 10
    assert highest_kib() <= 2 * unharmed_kib + SPARE_KIB, unharmed_kib


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
