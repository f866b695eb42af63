"""Build a tape from recordings of a model's passes at several sizes."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import inf, lcm
from typing import Any

from ligerprof.models.tape import POWERS, Event, Ref, Unit, encoded
from ligerprof.roles import Role
from ligerprof.runs.tapes.record import Recording, UnlikePassesError
from ligerprof.torch_memory.allocator.settings import SMALL_REQUEST_BYTES

Size = tuple[int, int]

# events that order matters for: frees between two of them commute
_PLACES = ("run", "take", "touch", "arrive")
# AccumulateGrad has the highest number, and the engine runs it at once
_NO_NODE = 2**62


def polynomials(sizes: Mapping[Size, Sequence[int]], blocks: int) -> tuple[list[tuple[int, ...]], list[int], int]:
    """The polynomials of all blocks; the number of each block's one; and the largest that is a bound only.

    Args:
        sizes: numbers by (batch, seq), each batch with each seq but the last, which checks what the others give.
        blocks: how many of the numbers are blocks' bytes; the others have to be polynomials.

    Raises:
        UnlikePassesError: a large block's size is not a polynomial.
    """
    # the last size checks, unless it is the only one
    others = list(sizes)[:-1] or list(sizes)
    batches = list(dict.fromkeys(batch for batch, _ in others))[:2]
    seqs = list(dict.fromkeys(seq for _, seq in others))[:3]
    grid = [size for size in others if size[0] in batches and size[1] in seqs]
    powers = [index for index, (row, token) in enumerate(POWERS) if row < len(batches) and token < len(seqs)]
    inverse = _inverse([[_value(POWERS[power], size) for power in powers] for size in grid])
    found: dict[tuple[int, ...], int] = {}
    known: dict[tuple[int, ...], int] = {}
    numbers, bounded_bytes = [], 0
    for index, values in enumerate(zip(*sizes.values(), strict=True)):
        if values not in known:
            polynomial = _polynomial(inverse, powers, list(sizes), values)
            if polynomial is None:
                if max(values) > SMALL_REQUEST_BYTES or index >= blocks:
                    raise UnlikePassesError(f"bytes {values} at {list(sizes)}")
                polynomial = (1, max(values), *(0,) * (len(POWERS) - 1))
                bounded_bytes = max(bounded_bytes, *values)
            known[values] = found.setdefault(polynomial, len(found))
        numbers.append(known[values])
    return list(found), numbers, bounded_bytes


def _polynomial(
    inverse: Sequence[Sequence[Fraction]], powers: Sequence[int], sizes: Sequence[Size], values: Sequence[int]
) -> tuple[int, ...] | None:
    """A denominator and the coefficients of `POWERS`, through the first values; None if the others do not agree."""
    coefficients = [Fraction(0)] * len(POWERS)
    for power, row in zip(powers, inverse, strict=True):
        coefficients[power] = sum((share * value for share, value in zip(row, values, strict=False)), Fraction(0))
    denominator = lcm(*(coefficient.denominator for coefficient in coefficients))
    whole = [int(coefficient * denominator) for coefficient in coefficients]
    for size, value in zip(sizes, values, strict=True):
        if (
            sum(factor * _value(power, size) for factor, power in zip(whole, POWERS, strict=True))
            != value * denominator
        ):
            return None
    return denominator, *whole


def _value(power: tuple[int, int], size: Size) -> Fraction:
    return Fraction(size[0] ** power[0] * size[1] ** power[1])


def _inverse(matrix: list[list[Fraction]]) -> list[list[Fraction]]:
    """By Gauss and Jordan."""
    size = len(matrix)
    rows = [row + [Fraction(int(index == other)) for other in range(size)] for index, row in enumerate(matrix)]
    for index in range(size):
        pivot = next(row for row in rows[index:] if row[index])
        rows.remove(pivot)
        rows.insert(index, [value / pivot[index] for value in pivot])
        for other in range(size):
            if other != index and rows[other][index]:
                factor = rows[other][index]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[index], strict=True)]
    return [row[size:] for row in rows]


class Folder:
    """Divides a recording into units, and stores those that are alike once.

    Args:
        recording: at one size.
        numbers: the polynomial of each block.
        roles: the role of each block.
        paths: path of each layer's module, by its number among the modules.
    """

    def __init__(
        self, recording: Recording, numbers: Sequence[int], roles: Sequence[Role], paths: Sequence[str]
    ) -> None:
        self._recording, self._numbers, self._roles = recording, numbers, roles
        # of each block: the position of its unit, and its number there
        self._homes: list[tuple[int, int]] = []
        self._counts: Counter[int] = Counter()
        self._scratches: dict[Any, int] = {}
        self._next = len(recording.sizes)
        self._arrived: set[Event] = set()
        self._ran = {event[1] for event in recording.backward if event[0] == "run"}
        enters = [event for event in recording.forward if event[0] == "enter"]
        self.called = [event[1] for event in enters]
        self._starts = [event[3] for event in enters]
        self._end = next((event[2] for event in reversed(recording.forward) if event[0] == "leave"), None)
        self.paths = [paths[number] for number in self.called]
        self._last = len(enters) + 1
        forward = self._forward()
        backward = self._backward()
        graph: dict[int, list[Ref]] = {}
        for block in recording.graph:
            home = self._homes[block][0]
            graph.setdefault(home, []).append(self._ref(block, home))
        found: dict[Unit, int] = {}
        self.order = []
        for position in range(self._last + 1):
            unit = Unit(
                forward=tuple(forward.get(position, ())),
                backward=tuple(backward.get(position, ())),
                graph=tuple(graph.get(position, ())),
            )
            self.order.append(found.setdefault(unit, len(found)))
        self.units, self.scratches = tuple(found), tuple(self._scratches)

    def _ref(self, block: int, position: int) -> Ref:
        home, number = self._homes[block]
        if home == position:
            return number
        if home == self._last:
            return (None, number)
        return (0 if home == 0 else home - position, number)

    def _touch(self, number: int) -> Event:
        """What an operator allocates while it runs has the role of the last block."""
        name, arguments, named = self._recording.scratches[number]
        places: list[int] = []
        template = encoded((arguments, tuple(named.values())), places)
        fitted = self._numbers[self._next : self._next + len(places)]
        self._next += len(places)
        _, in_order, by_name = _with_numbers(template, fitted)
        scratch = (name, in_order, tuple(zip(named, by_name[1:], strict=True)))
        role = self._roles[len(self._homes) - 1] if self._homes else Role.ACTIVATIONS
        return ("touch", self._scratches.setdefault(scratch, len(self._scratches)), role)

    def _take(self, block: int, position: int) -> Event:
        self._homes.append((position, self._counts[position]))
        self._counts[position] += 1
        role = Role.WEIGHT_CASTS if block in self._recording.casts else self._roles[block]
        return ("take", self._numbers[block], role)

    def _position(self, node: int) -> int:
        """The position of the unit that made a node."""
        if self._end is None or node >= self._end:
            return self._last if self._end is not None else 0
        return sum(start <= node for start in self._starts)

    def _node(self, node: int, position: int) -> int:
        """The number of a node within its unit."""
        return node - (self._starts[position - 1] if 0 < position < self._last else 0)

    def _common(self, event: Event, position: int) -> Event | None:
        """An event that both passes have, as a unit's; None for others."""
        kind = event[0]
        if kind == "take":
            return self._take(event[1], position)
        if kind == "touch":
            return self._touch(event[1])
        if kind == "drop":
            return ("drop", self._ref(event[1], position))
        if kind == "arrive":
            if event in self._arrived:
                # added to in place
                return None
            self._arrived.add(event)
            return ("arrive", self._relative(event[1], position), self._ref(event[2], position))
        return event if kind == "multiply" else None

    def _forward(self) -> dict[int, list[Event]]:
        events: dict[int, list[Event]] = {}
        position = entered = 0
        for event in self._recording.forward:
            kind = event[0]
            if kind == "enter":
                entered += 1
                position = entered
            unit = events.setdefault(position, [])
            if (common := self._common(event, position)) is not None:
                unit.append(common)
            elif kind == "save":
                unit.append(self._save(event[1], event[2], position))
            elif kind == "enter":
                unit.append(("enter", tuple(self._ref(block, position) for block in event[2])))
            elif kind == "leave":
                unit.append(("leave",))
                if entered == self._last - 1:
                    position = self._last
        return events

    def _save(self, node: int, block: int | None, position: int) -> Event:
        """A node saves a tensor; one that never runs backward ends with its output, and what it has saved with it."""
        if node not in self._ran:
            return ("save", None, None)
        return ("save", self._node(node, position), None if block is None else self._ref(block, position))

    def _backward(self) -> dict[int, list[Event]]:
        events: dict[int, list[Event]] = {}
        saves: dict[int, set[int | None]] = {}
        for event in self._recording.forward:
            if event[0] == "save":
                saves.setdefault(event[1], set()).add(event[2])
        marks, held = self._marks(saves)
        holders = {block for blocks in saves.values() for block in blocks}.union(self._recording.graph)
        taken, started = len(self._homes), set[int]()
        position, place = self._last if self._end is not None else 0, 0
        for event in self._recording.backward:
            kind = event[0]
            if kind in _PLACES:
                self._mark(events, marks.pop(place, ()), position)
                place += 1
            if kind == "run" and event[1] is not None and event[1] < _NO_NODE:
                position = self._moved(event, position)
                if event[1] in saves and event[1] not in started:
                    started.add(event[1])
                    events.setdefault(position, []).append(("start", self._node(event[1], position)))
            elif kind != "drop" or event[1] >= taken or event[1] not in holders or event[1] in held:
                # what else forward has made is freed by its holders
                common = self._common(event, position)
                events.setdefault(position, []).extend(() if common is None else (common,))
        self._mark(events, marks.pop(place, ()), position)
        return events

    def _marks(self, saves: Mapping[int, Collection[int | None]]) -> tuple[dict[int, list[tuple[str, int]]], set[int]]:
        """What happens besides operators, by numbers of events of `_PLACES`.

        Returns:
            where nodes free what they have saved, with hooks and without, and where a block that one of them has saved
            has another holder from then on, such as a gradient that forward has computed; and those blocks.
        """
        marks: dict[int, list[tuple[str, int]]] = {}
        released: dict[int, int] = {}
        for kind, source in (("unpacked", self._recording.unpacked), ("release", self._recording.backward)):
            for place, node in _releases(source, saves):
                marks.setdefault(place, []).append((kind, node))
                if kind == "release":
                    released.update((block, place) for block in saves[node] if block is not None)
        ends = dict(_ends(self._recording.backward))
        outlive = {block: place for block, place in released.items() if ends.get(block, inf) > place}
        held = outlive.keys() - self._recording.graph
        for block in held:
            marks[outlive[block]].insert(0, ("hold", block))
        return marks, held

    def _moved(self, event: Event, position: int) -> int:
        """The position of a node that runs; raises UnlikePassesError if it is behind that of an earlier one."""
        new = self._position(event[1])
        if new > position:
            raise UnlikePassesError(f"backward returns to a later layer with {event[2]}")
        return new

    def _mark(self, events: dict[int, list[Event]], marks: Iterable[tuple[str, int]], position: int) -> None:
        for kind, number in marks:
            if kind == "hold":
                events.setdefault(position, []).append((kind, self._ref(number, position)))
            else:
                home = self._position(number)
                events.setdefault(home, []).append((kind, self._node(number, home)))

    def _relative(self, name: str, position: int) -> str:
        if 0 < position < self._last and name.startswith(f"{self.paths[position - 1]}."):
            return "{}" + name.removeprefix(self.paths[position - 1])
        return name


def _with_numbers(template: Any, fitted: Sequence[int]) -> Any:
    """An encoded argument with other numbers."""
    if not isinstance(template, tuple):
        return template
    if template[:1] == ("number",):
        return ("number", fitted[template[1]])
    return tuple(_with_numbers(item, fitted) for item in template)


def _ends(events: Sequence[Event]) -> Iterator[tuple[int, int]]:
    """Where each block is freed, as a number of events of `_PLACES`."""
    place = 0
    for event in events:
        if event[0] == "drop":
            yield event[1], place
        place += event[0] in _PLACES


def _releases(events: Sequence[Event], saves: Mapping[int, Collection[int | None]]) -> Iterator[tuple[int, int]]:
    """Where each node frees what it has saved, as a number of events of `_PLACES`.

    It is where a block ends that the node has saved; if all of them have other holders, where the node ends.
    """
    place, current, found = 0, -1, False
    for event in events:
        kind = event[0]
        if kind == "run" and event[1] != current:
            if current in saves and not found:
                yield place, current
            current, found = event[1], False
        if kind == "drop" and not found and event[1] in saves.get(current, ()):
            yield place, current
            found = True
        place += kind in _PLACES
    if current in saves and not found:
        yield place, current
