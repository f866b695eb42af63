"""Hostile files, each read in a process with audited events, time and memory."""

import json
import lzma
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ligerprof.units import MIB
from tests.paths import REPOSITORY
from tests.torch_memory.allocator.programs import random_program

START = b"\x80\x04"
DEEP = 100_000
# limits on the processor time per file, and on memory beyond three times the unpacked bytes
MOST_SECONDS, SPARE_BYTES = 10, 256 * MIB

# Everything is imported and one good file is explained before the audit begins. After that, only the given file may be
# opened, and nothing may be started, imported, compiled or run. Each file is explained in a fork of this process.
CHILD = """
import gzip, json, lzma, os, sys, time
from pathlib import Path
from ligerprof.analyzers.explain.analysis import explain
from ligerprof.errors import LigerprofError

OWN_MEMORY = "/proc/self/statm"
HARMLESS = ("object.__getattr__", "object.__setattr__", "builtins.id")

def highest_memory():
    # not ru_maxrss, which starts with the parent's memory
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

def audit(event, arguments):
    if path is None or event in HARMLESS or (event == "open" and os.fspath(arguments[0]) in (path, OWN_MEMORY)):
        return
    broken.append((event, repr(arguments)[:200]))

explain(sys.argv[1])
path, broken = None, []
for current in map(str.rstrip, sys.stdin):
    if os.fork():
        if os.wait()[1]:
            sys.exit(f"{current}: the process that read it crashed")
        continue
    os.chdir(os.path.dirname(current))
    unharmed, message, began = highest_memory(), None, time.process_time()
    sys.addaudithook(audit)
    path = current
    try:
        explain(path)
    except LigerprofError as error:
        message = str(error)
    path = None
    seconds = time.process_time() - began
    outcome = {"message": message, "seconds": seconds, "memory": highest_memory() - unharmed}
    print(json.dumps({"broken": broken, **outcome}), flush=True)
    os._exit(0)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """A file.

    Attributes:
        says: part of the expected error; "" if the file may have a report.
    """

    content: bytes
    says: str = ""


class Calls:
    """An object whose pickle calls a function that creates the canary file."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self._canary,))


def text(value: str) -> bytes:
    packed = value.encode()
    return b"X" + struct.pack("<I", len(packed)) + packed


def good_values() -> dict[str, Any]:
    return random_program(3, events=80).snapshot()


def attacks(canary: Path) -> dict[str, Callable[[], Iterable[Attack]]]:
    """The variants of each kind of attack, made when they are needed: some are large."""
    path = text(str(canary))
    make_folder = b"cos\nmkdir\n"
    values = good_values()
    return {
        "reduce": lambda: (
            Attack(content=START + make_folder + path + b"\x85R.", says="GLOBAL"),
            Attack(content=pickle.dumps({**values, "allocator_settings": Calls(canary)}), says="refusing"),
            Attack(content=pickle.dumps({"segments": Calls(canary)}, 2), says="GLOBAL"),
        ),
        "build": lambda: (Attack(content=START + b"}" + text("x") + path + b"sb.", says="BUILD"),),
        "global": lambda: (
            Attack(content=START + b"cantigravity\nfly\n.", says="GLOBAL"),
            Attack(content=START + b"\x8c\x02os\x8c\x05mkdir\x93.", says="STACK_GLOBAL"),
        ),
        "inst": lambda: (Attack(content=START + b"(" + path + b"ios\nmkdir\n.", says="INST"),),
        "obj": lambda: (
            Attack(content=START + b"(" + make_folder + path + b"o.", says="GLOBAL"),
            Attack(content=START + b"(N" + path + b"o.", says="OBJ"),
            Attack(content=START + b"N)\x81.", says="NEWOBJ"),
            Attack(content=START + b"N)}\x92.", says="NEWOBJ_EX"),
        ),
        "ext": lambda: (
            Attack(content=START + b"\x82\x01.", says="EXT1"),
            Attack(content=START + b"\x83\x01\x00.", says="EXT2"),
            Attack(content=START + b"\x84\x01\x00\x00\x00.", says="EXT4"),
            Attack(content=START + b"Pid\n.", says="PERSID"),
            Attack(content=START + b"}Q.", says="BINPERSID"),
        ),
        "memo bomb": lambda: (
            Attack(content=START + b"}r\xff\xff\xff\x7f.", says="memo index 2147483647"),
            Attack(content=pickle.dumps(values, 2)[:-1] + b"r\x00\x00\x00\x40.", says="memo index 1073741824"),
            Attack(content=START + b"}p2147483647\n.", says="PUT"),
            Attack(content=START + b"}K\x01" + b"2\x86" * 60 + b"K\x01s.", says="not supported"),
        ),
        "deep nesting": lambda: (
            Attack(content=START + b"]" * DEEP + b"a" * (DEEP - 1) + b".", says="not a list of dicts"),
            Attack(content=START + b"}" + b"K\x01}" * DEEP + b"s" * DEEP + b".", says="neither"),
            Attack(content=START + b"(" * (4 * MIB) + b".", says="damaged"),
            Attack(content=pickle.dumps({"device_traces": [[{"action": "alloc", "frames": nested(300)}]]})),
        ),
        "huge declared lengths": lambda: (
            Attack(content=START + b"X\xff\xff\xff\x7f.", says="text of 2147483647 bytes declared"),
            Attack(content=START + b"\x8d" + struct.pack("<Q", 2**60) + b".", says="not supported"),
            Attack(content=START + b"\x8e" + struct.pack("<Q", 2**60) + b".", says="not supported"),
            Attack(content=START + b"\x96" + struct.pack("<Q", 2**33) + b".", says="BYTEARRAY8"),
            Attack(content=START + b"\x8b\xff\xff\xff\x7f.", says="not supported"),
            Attack(content=START + b"I" + b"9" * 100_000 + b"\n.", says="not supported"),
            Attack(content=START + b"\x95" + struct.pack("<Q", 2**60) + b"}.", says="frame of"),
        ),
        "quadratic work": lambda: (
            Attack(content=pickle.dumps(fragmented(24_000))),
            Attack(content=pickle.dumps({"device_traces": [[{"action": "oom"}]] * 65_536}), says="65536 devices"),
        ),
        "lists that share items": lambda: [Attack(content=content) for content in shared_lists()],
        "memory": lambda: (
            Attack(content=START + b"]" * (9 * MIB) + b".", says="of memory"),
            Attack(
                content=START + b"\x95" + struct.pack("<Q", 9 * MIB) + b"}" * (9 * MIB - 1) + b".", says="of memory"
            ),
            Attack(content=lzma.compress(START + b"}" * (60 * MIB) + b"."), says="of memory"),
        ),
        "keys with one hash": lambda: (
            Attack(content=START + b"}(" + b"".join(equal_pairs(100_000)) + b"u.", says="pairs of small ones"),
            Attack(content=START + b"}(" + b"".join(equal_integers(100_000)) + b"u.", says="64-bit"),
        ),
    }


def fragmented(events: int) -> dict[str, Any]:
    """A segment of small free blocks, and frees at addresses inside them."""
    start, free = 2**40, {"size": 512, "state": "inactive"}
    blocks = [{"size": 512, "state": "active_allocated"}, free] * events
    segment = {"address": start, "total_size": 1024 * events, "blocks": blocks}
    trace = [{"action": "free_completed", "addr": start + 1024 * n + 768, "size": 256} for n in range(events)]
    return {"segments": [segment], "device_traces": [trace]}


def shared_lists() -> list[bytes]:
    """Lists that share items, 45 deep, as any value of a segment or an event."""
    laugh: list[object] = ["ha"]
    for _ in range(45):
        laugh = [laugh, laugh]
    contents = []
    for holder in ("segments", "blocks", "events"):
        for key in holders_of(good_values())[holder][0]:
            values = good_values()
            for number, each in enumerate(holders_of(values)[holder]):
                # other lists of the same shape, so that a careless comparison never ends
                each[key] = [[*laugh], number] if number else laugh
            contents.append(pickle.dumps(values))
    return contents


def holders_of(values: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {
        "segments": values["segments"],
        "blocks": [block for segment in values["segments"] for block in segment["blocks"]],
        "events": values["device_traces"][0],
    }


def equal_pairs(count: int) -> Iterator[bytes]:
    """Keys that are pairs of integers with one hash, with their values."""
    first_prime, second_prime, fifth_prime = 11400714785074694791, 14029467366897019727, 2870177450012600261
    mask = 2**64 - 1
    undo = pow(second_prime, -1, 2**64)
    for first in range(count):
        # CPython's hash of a pair, undone: https://github.com/python/cpython/blob/main/Objects/tupleobject.c
        state = (fifth_prime + first * second_prime) & mask
        state = ((state << 31 | state >> 33) & mask) * first_prime & mask
        second = (12345 - state) * undo & mask
        if second < 2**61 - 1:
            yield pickle.dumps((first, second))[11:-2] + b"N"


def equal_integers(count: int) -> Iterator[bytes]:
    """Keys that are integers with one hash, with their values."""
    for number in range(count):
        yield b"\x8a\x14" + (number << 61 | 0).to_bytes(20, "little") + b"N"


def hidden_files(canary: Path) -> dict[str, bytes]:
    """Files with the names of readers' caches, and modules with the names of our imports."""
    caches = (".snapshot-0.pickle.cache", "snapshot-0.pickle.cache", "snapshot-0.pickle.pkl", "result.json")
    modules = ("pickle.py", "numpy.py", "ligerprof.py", "conftest.py", "sitecustomize.py")
    return {
        **{name: pickle.dumps(Calls(canary)) for name in caches},
        **{name: f"open({str(canary)!r}, 'w')".encode() for name in modules},
    }


def nested(depth: int) -> object:
    value: object = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture(scope="module")
def auditor(tmp_path_factory: pytest.TempPathFactory) -> Iterator["subprocess.Popen[str]"]:
    """The audited process, started once; each file is read in a fork of it."""
    with start_audited(CHILD, tmp_path_factory.mktemp("audited")) as process:
        yield process


@pytest.mark.parametrize("kind", sorted(attacks(Path("canary"))))
def test_hostile_files_run_nothing_and_stay_within_bounds(
    kind: str, auditor: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    folder = tmp_path / "run"
    folder.mkdir()
    variants = {folder / f"snapshot-{index}.pickle": attack for index, attack in enumerate(attacks(canary)[kind]())}
    for path, attack in variants.items():
        path.write_bytes(attack.content)
    before = sorted(path.name for path in folder.iterdir())

    for path, attack in variants.items():
        check(attack, path, answer(auditor, path))

    assert not canary.exists()
    assert sorted(path.name for path in folder.iterdir()) == before


def check(attack: Attack, path: Path, outcome: dict[str, Any]) -> None:
    assert outcome["broken"] == []
    assert outcome["seconds"] < MOST_SECONDS
    assert outcome["memory"] < 3 * len(unpacked(attack.content)) + SPARE_BYTES
    if attack.says:
        assert outcome["message"].startswith(str(path))
        assert attack.says in outcome["message"]
        assert "\n" not in outcome["message"]


def test_files_next_to_a_snapshot_are_neither_imported_nor_read(tmp_path: Path) -> None:
    """In a process that starts in their folder, as after unpacking an archive."""
    canary, folder = tmp_path / "canary", tmp_path / "run"
    folder.mkdir()
    path = folder / "snapshot-0.pickle"
    attack = Attack(content=pickle.dumps(good_values()))
    for name, content in {path.name: attack.content, **hidden_files(canary)}.items():
        (folder / name).write_bytes(content)
    before = sorted(path.name for path in folder.iterdir())

    with start_audited(CHILD, tmp_path, folder) as process:
        check(attack, path, answer(process, path))

    assert not canary.exists()
    assert sorted(path.name for path in folder.iterdir()) == before


def unpacked(content: bytes) -> bytes:
    return lzma.decompress(content) if content.startswith(b"\xfd7zXZ") else content


@contextmanager
def start_audited(child: str, place: Path, working: Path | None = None) -> Iterator["subprocess.Popen[str]"]:
    """Start the process in a working directory, with its script and the good file in another place."""
    # Python looks for modules in the script's folder, not in the working directory
    script, good = place / "audit" / "audit.py", place / "good.pickle"
    script.parent.mkdir()
    script.write_text(child, encoding="utf-8")
    good.write_bytes(pickle.dumps(good_values()))
    with subprocess.Popen(
        [sys.executable, str(script), str(good)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=working or place,
        # numpy's threads do not survive a fork
        env={"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
    ) as process:
        yield process
        process.communicate()
    assert process.returncode == 0


def answer(process: "subprocess.Popen[str]", path: Path) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{path}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())  # type: ignore[no-any-return]


def test_the_audit_detects_a_careless_reader(tmp_path: Path) -> None:
    """The same child with pickle.load instead of the reader: the canary exists, and the audit reports it."""
    canary, folder = tmp_path / "canary", tmp_path / "run"
    folder.mkdir()
    path = folder / "snapshot.pickle"
    path.write_bytes(next(iter(attacks(canary)["reduce"]())).content)
    careless = CHILD.replace("        explain(path)", "        __import__('pickle').load(open(path, 'rb'))")
    assert careless != CHILD

    with start_audited(careless, tmp_path) as process:
        outcome = answer(process, path)

    assert canary.exists()
    assert {"pickle.find_class", "os.mkdir"} <= {event for event, _ in outcome["broken"]}
