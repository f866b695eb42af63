"""Damaged snapshots: changed bytes, or values changed before they are pickled again."""

import lzma
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.paths import RECORDINGS
from tests.torch_memory.allocator.programs import random_program

PROTOCOLS = (2, 3, 4, 5)
STRANGE: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: True,
    lambda: -1,
    lambda: 0,
    lambda: 1,
    lambda: 2**31,
    lambda: -(2**31),
    lambda: 2**62,
    lambda: 2**63 - 1,
    lambda: 2**63,
    lambda: -(2**63),
    lambda: 10**30,
    lambda: 1.5,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: -float("inf"),
    lambda: "",
    lambda: "alloc",
    lambda: "x" * 3000,
    lambda: "\x1b[2J\n",
    lambda: "\ud800",
    list,
    dict,
    lambda: [[]],
    lambda: [{}],
    lambda: {"frames": []},
    lambda: {1: 2},
    lambda: (1, 2),
)
Pick = random.Random


def originals() -> dict[str, dict[str, Any]]:
    """Small snapshots: of random programs, and the end of a real recording with its stacks."""
    found = {
        "program": random_program(5, events=60).snapshot(),
        "expandable program": random_program(6, events=60, expandable=True).snapshot(),
    }
    packed = (RECORDINGS / "small-own-all-python.pickle.xz").read_bytes()
    recording: dict[str, Any] = pickle.loads(lzma.decompress(packed))
    recording["device_traces"] = [trace[-150:] for trace in recording["device_traces"]]
    for event in recording["device_traces"][0]:
        event["frames"] = event["frames"][:6]
    return {**found, "recording": recording}


def damaged_bytes(whole: bytes, draw: Pick) -> bytes:
    """Change, drop or double a few bytes."""
    damaged = bytearray(whole)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at, kind = draw.randrange(len(damaged)), draw.random()
        if kind < 0.7:
            damaged[at] = draw.randrange(256)
        elif kind < 0.85:
            del damaged[at : at + draw.randrange(1, 40)]
        else:
            damaged[at:at] = damaged[at : at + draw.randrange(1, 400)]
    return bytes(damaged)


def damaged_values(values: dict[str, Any], draw: Pick) -> bytes:
    """Change a few values of the snapshot and pickle it again with any protocol."""
    changed = pickle.loads(pickle.dumps(values))
    for _ in range(draw.choice([1, 1, 2, 4, 16])):
        draw.choice(CHANGES)(changed, draw)
    return pickle.dumps(changed, draw.choice(PROTOCOLS))


def holders(value: Any) -> Iterator[Any]:
    """Every dict and list inside a value, once each."""
    seen, waiting = set(), [value]
    while waiting:
        holder = waiting.pop()
        if not isinstance(holder, (dict, list)) or id(holder) in seen:
            continue
        seen.add(id(holder))
        yield holder
        waiting += holder.values() if isinstance(holder, dict) else holder


def some_holder(values: Any, draw: Pick, kind: type | tuple[type, ...] = (dict, list)) -> Any:
    """A random dict or list that is not empty; None if the random path leads to none."""
    found, holder = None, values
    # values may contain themselves
    for _ in range(12):
        if not isinstance(holder, (dict, list)) or not holder:
            break
        if isinstance(holder, kind):
            found = holder
            if draw.random() < 0.15:
                break
        holder = holder[some_place(holder, draw)]
    return found


def some_place(holder: Any, draw: Pick) -> Any:
    return draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))


def drop(values: Any, draw: Pick) -> None:
    if holder := some_holder(values, draw):
        del holder[some_place(holder, draw)]


def replace(values: Any, draw: Pick) -> None:
    if holder := some_holder(values, draw):
        holder[some_place(holder, draw)] = draw.choice(STRANGE)()


def swap(values: Any, draw: Pick) -> None:
    """Swap two values anywhere."""
    first, second = some_holder(values, draw), some_holder(values, draw)
    if first and second:
        here, there = some_place(first, draw), some_place(second, draw)
        first[here], second[there] = second[there], first[here]


def negate(values: Any, draw: Pick) -> None:
    """Change a number's sign, or make it slightly or much larger."""
    holder = some_holder(values, draw, dict) or {}
    numbers = [key for key, value in holder.items() if type(value) is int]
    if numbers:
        place = draw.choice(numbers)
        holder[place] = draw.choice([-holder[place], holder[place] + 1, holder[place] * 2**20, holder[place] ^ 512])


def tie(values: Any, draw: Pick) -> None:
    """Make a value contain itself, or contain another one twice."""
    if holder := some_holder(values, draw):
        holder[some_place(holder, draw)] = draw.choice([values, holder, some_holder(values, draw)])


def reorder(values: Any, draw: Pick) -> None:
    if items := some_holder(values, draw, list):
        draw.choice([items.reverse, items.pop, lambda: items.insert(0, items[-1]), lambda: draw.shuffle(items)])()


def rename(values: Any, draw: Pick) -> None:
    """Replace a key by another, which may already exist or may not be text."""
    if holder := some_holder(values, draw, dict):
        value = holder.pop(draw.choice(list(holder)))
        holder[draw.choice(["action", "addr", "size", "blocks", "x", "", 5, None])] = value


CHANGES: tuple[Callable[[Any, Pick], None], ...] = (drop, replace, replace, swap, negate, tie, reorder, rename)
