"""Hostile files, each read in a process with audited events, time and memory."""

import json
import lzma
import pickle
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
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
# opened, and nothing may be started, imported, compiled or run.
CHILD = """
import json, os, sys, time
from pathlib import Path
from ligerprof.analyzers.explain.analysis import explain
from ligerprof.errors import LigerprofError

def highest_memory():
    # not ru_maxrss, which starts with the parent's memory
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

good, paths = sys.argv[1], sys.argv[2:]
explain(good)
unharmed = highest_memory()
path, broken = None, []

def audit(event, arguments):
    if path is None or event in HARMLESS or (event == "open" and os.fspath(arguments[0]) in (path, OWN_MEMORY)):
        return
    broken.append((event, repr(arguments)[:200]))

OWN_MEMORY = "/proc/self/statm"
HARMLESS = ("object.__getattr__", "object.__setattr__", "builtins.id")
sys.addaudithook(audit)
for path in paths:
    broken, message, began = [], None, time.process_time()
    try:
        explain(path)
    except LigerprofError as error:
        message = str(error)
    current, path = path, None
    seconds = time.process_time() - began
    outcome = {"message": message, "seconds": seconds, "memory": highest_memory()}
    print(json.dumps({"path": current, "unharmed": unharmed, "broken": broken, **outcome}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """A file, with other files next to it.

    Attributes:
        says: part of the expected error; "" if the file may have a report.
    """

    content: bytes
    says: str = ""
    neighbors: dict[str, bytes] = field(default_factory=dict)


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


def attacks(canary: Path) -> dict[str, tuple[Attack, ...]]:
    """The variants of each kind of attack."""
    path = text(str(canary))
    make_folder = b"cos\nmkdir\n"
    values = good_values()
    return {
        "reduce": (
            Attack(content=START + make_folder + path + b"\x85R.", says="GLOBAL"),
            Attack(content=pickle.dumps({**values, "allocator_settings": Calls(canary)}), says="refusing"),
            Attack(content=pickle.dumps({"segments": Calls(canary)}, 2), says="GLOBAL"),
        ),
        "build": (Attack(content=START + b"}" + text("x") + path + b"sb.", says="BUILD"),),
        "global": (
            Attack(content=START + b"cantigravity\nfly\n.", says="GLOBAL"),
            Attack(content=START + b"\x8c\x02os\x8c\x05mkdir\x93.", says="STACK_GLOBAL"),
        ),
        "inst": (Attack(content=START + b"(" + path + b"ios\nmkdir\n.", says="INST"),),
        "obj": (
            Attack(content=START + b"(" + make_folder + path + b"o.", says="GLOBAL"),
            Attack(content=START + b"(N" + path + b"o.", says="OBJ"),
            Attack(content=START + b"N)\x81.", says="NEWOBJ"),
            Attack(content=START + b"N)}\x92.", says="NEWOBJ_EX"),
        ),
        "ext": (
            Attack(content=START + b"\x82\x01.", says="EXT1"),
            Attack(content=START + b"\x83\x01\x00.", says="EXT2"),
            Attack(content=START + b"\x84\x01\x00\x00\x00.", says="EXT4"),
            Attack(content=START + b"Pid\n.", says="PERSID"),
            Attack(content=START + b"}Q.", says="BINPERSID"),
        ),
        "memo bomb": (
            Attack(content=START + b"}r\xff\xff\xff\x7f.", says="memo index 2147483647"),
            Attack(content=pickle.dumps(values, 2)[:-1] + b"r\x00\x00\x00\x40.", says="memo index 1073741824"),
            Attack(content=START + b"}p2147483647\n.", says="PUT"),
            Attack(content=START + b"}K\x01" + b"2\x86" * 60 + b"K\x01s.", says="not supported"),
        ),
        "deep nesting": (
            Attack(content=START + b"]" * DEEP + b"a" * (DEEP - 1) + b".", says="not a list of dicts"),
            Attack(content=START + b"}" + b"K\x01}" * DEEP + b"s" * DEEP + b".", says="neither"),
            Attack(content=START + b"(" * (4 * MIB) + b".", says="damaged"),
            Attack(content=pickle.dumps({"device_traces": [[{"action": "alloc", "frames": nested(300)}]]})),
        ),
        "huge declared lengths": (
            Attack(content=START + b"X\xff\xff\xff\x7f.", says="text of 2147483647 bytes declared"),
            Attack(content=START + b"\x8d" + struct.pack("<Q", 2**60) + b".", says="not supported"),
            Attack(content=START + b"\x8e" + struct.pack("<Q", 2**60) + b".", says="not supported"),
            Attack(content=START + b"\x96" + struct.pack("<Q", 2**33) + b".", says="BYTEARRAY8"),
            Attack(content=START + b"\x8b\xff\xff\xff\x7f.", says="not supported"),
            Attack(content=START + b"I" + b"9" * 100_000 + b"\n.", says="not supported"),
            Attack(content=START + b"\x95" + struct.pack("<Q", 2**60) + b"}.", says="frame of"),
        ),
        "quadratic work": (
            Attack(content=pickle.dumps(fragmented(24_000))),
            Attack(content=pickle.dumps({"device_traces": [[{"action": "oom"}]] * 65_536}), says="65536 devices"),
        ),
        "lists that share items": tuple(Attack(content=content) for content in shared_lists()),
        "memory": (
            Attack(content=START + b"]" * (9 * MIB) + b".", says="of memory"),
            Attack(
                content=START + b"\x95" + struct.pack("<Q", 9 * MIB) + b"}" * (9 * MIB - 1) + b".", says="of memory"
            ),
            # the smaller ones come first, since memory is measured at its peak
            Attack(content=lzma.compress(START + b"}" * (60 * MIB) + b"."), says="of memory"),
        ),
        "keys with one hash": (
            Attack(content=START + b"}(" + b"".join(equal_pairs(100_000)) + b"u.", says="pairs of small ones"),
            Attack(content=START + b"}(" + b"".join(equal_integers(100_000)) + b"u.", says="64-bit"),
        ),
        "a hidden file next to it": (Attack(content=pickle.dumps(values), neighbors=hidden_files(canary)),),
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


@pytest.mark.parametrize("kind", sorted(attacks(Path("canary"))))
def test_hostile_files_run_nothing_and_stay_within_bounds(kind: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    folder = tmp_path / "run"
    folder.mkdir()
    variants = {folder / f"snapshot-{index}.pickle": attack for index, attack in enumerate(attacks(canary)[kind])}
    (folder / "good.pickle").write_bytes(pickle.dumps(good_values()))
    for path, attack in variants.items():
        path.write_bytes(attack.content)
        for name, content in attack.neighbors.items():
            (folder / name).write_bytes(content)
    before = sorted(path.name for path in folder.iterdir())

    answers = run_audited(CHILD, folder, variants)

    assert not canary.exists()
    assert sorted(path.name for path in folder.iterdir()) == before
    for (path, attack), outcome in zip(variants.items(), answers, strict=True):
        assert outcome["broken"] == []
        assert outcome["seconds"] < MOST_SECONDS
        assert outcome["memory"] - outcome["unharmed"] < 3 * len(unpacked(attack.content)) + SPARE_BYTES
        if attack.says:
            assert outcome["message"].startswith(str(path))
            assert attack.says in outcome["message"]
            assert "\n" not in outcome["message"]


def unpacked(content: bytes) -> bytes:
    return lzma.decompress(content) if content.startswith(b"\xfd7zXZ") else content


def run_audited(child: str, folder: Path, paths: Iterable[Path]) -> list[dict[str, Any]]:
    # Python looks for modules in the script's folder, not in the working directory
    script = folder.parent / "audit" / "audit.py"
    script.parent.mkdir()
    script.write_text(child, encoding="utf-8")
    finished = subprocess.run(
        [sys.executable, str(script), str(folder / "good.pickle"), *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        # as after unpacking an archive
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert finished.returncode == 0, finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines()]


def test_the_audit_detects_a_careless_reader(tmp_path: Path) -> None:
    """The same child with pickle.load instead of the reader: the canary exists, and the audit reports it."""
    canary, folder = tmp_path / "canary", tmp_path / "run"
    folder.mkdir()
    (folder / "good.pickle").write_bytes(pickle.dumps(good_values()))
    (folder / "snapshot.pickle").write_bytes(attacks(canary)["reduce"][0].content)
    careless = CHILD.replace("        explain(path)", "        __import__('pickle').load(open(path, 'rb'))")
    assert careless != CHILD

    (outcome,) = run_audited(careless, folder, [folder / "snapshot.pickle"])

    assert canary.exists()
    assert {"pickle.find_class", "os.mkdir"} <= {event for event, _ in outcome["broken"]}
