"""The allocations and frees of one estimated step in order, with those of layers that the estimate ran only once."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from ligerprof.roles import Phase, Role
from ligerprof.torch_memory.dtypes import Scratch


class _Body(NamedTuple):
    """Events that were recorded once for several repetitions.

    Attributes:
        group: the first of the layers that repeat; their forward and backward passes share it.
        backward: whether the repetitions run from the last layers to the first.
    """

    group: int
    times: int
    backward: bool
    start: int
    end: int


@dataclass(slots=True)
class Recording:
    """The events of one step.

    Attributes:
        sizes, roles, streams: of each block, by its number.
        places: the part of the model that each block belongs to; empty where weights share what it holds.
        events: the number of a block where it is allocated, and its complement where it is freed.
        kept: the blocks that outlive the step.
        micro_batches: the number of events before each micro-batch, and before what follows the last one.
        phases: the number of events before each phase; the first one begins with the part.
        emptied: the numbers of events before each `empty_cache` of the build.
        modules: under ZeRO-3, the modules in the order in which a micro-batch called them.
    """

    sizes: list[int] = field(default_factory=list)
    roles: list[Role] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    micro_batches: list[int] = field(default_factory=list)
    phases: list[tuple[int, Phase]] = field(default_factory=list)
    emptied: list[int] = field(default_factory=list)
    modules: Sequence[str] = ()
    _bodies: list[_Body] = field(default_factory=list)
    _added: dict[tuple[Role, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    _missing: Counter[tuple[Role, int]] = field(default_factory=Counter)

    def allocate(self, size_bytes: int, role: Role, stream: int = 0, *, kept: bool = False, place: str = "") -> int:
        """Record an allocation; returns the block's number."""
        number = len(self.sizes)
        self.sizes.append(size_bytes)
        self.roles.append(role)
        self.streams.append(stream)
        self.places.append(place)
        self.events.append(number)
        if kept:
            self.kept.add(number)
        return number

    def begin(self, phase: Phase) -> None:
        """Record that a phase begins."""
        self.phases.append((len(self.events), phase))

    def free(self, number: int) -> None:
        """Record that a block is freed."""
        self.events.append(~number)

    def release(self, number: int) -> None:
        """Record that a block is freed that was to outlive the step."""
        self.free(number)
        self.kept.discard(number)

    def empty_cache(self) -> None:
        """Record that what is cached is given back."""
        self.emptied.append(len(self.events))

    def add(self, role: Role, size_bytes: int, place: str) -> None:
        """Record bytes that come as one block; negative bytes free the block of that size that came last.

        If there is none, the same bytes, which come later, are not recorded either.
        """
        blocks, missing = self._added[role, abs(size_bytes)], (role, abs(size_bytes))
        if size_bytes > 0 and self._missing[missing]:
            self._missing[missing] -= 1
        elif size_bytes > 0:
            blocks.append(self.allocate(size_bytes, role, place=place))
        elif size_bytes < 0 and blocks:
            self.free(blocks.pop())
        elif size_bytes < 0:
            self._missing[missing] += 1

    def keep(self, sizes: Iterable[int], role: Role, place: str = "") -> None:
        """Note blocks that stay."""
        for size_bytes in sizes:
            self.allocate(size_bytes, role, kept=True, place=place)

    def touch(self, sizes: Sequence[int], role: Role) -> None:
        """Record blocks that are allocated one after another and freed together."""
        for number in [self.allocate(size_bytes, role) for size_bytes in sizes if size_bytes > 0]:
            self.free(number)

    def run(self, scratch: Scratch, role: Role) -> None:
        """Record blocks that are allocated and freed in this order."""
        held: dict[int, list[int]] = {}
        for size_bytes in scratch:
            if size_bytes > 0:
                held.setdefault(size_bytes, []).append(self.allocate(size_bytes, role))
            else:
                self.free(held[-size_bytes].pop(0))

    def build(self, sizes: Sequence[int]) -> None:
        """Record what building a model allocates and, less than 0, the number of an allocation that it frees."""
        numbers: list[int] = []
        for size_bytes in sizes:
            if size_bytes >= 0:
                numbers.append(self.allocate(size_bytes, Role.PARAMETERS, kept=True))
            else:
                self.release(numbers[-1 - size_bytes])

    def free_all(self, role: Role) -> None:
        """Record that all blocks of a role are freed."""
        freed = {~event for event in self.events if event < 0}
        for number, other in enumerate(self.roles):
            if other is role and number not in freed:
                self.free(number)

    @contextmanager
    def repetition(self, group: int, times: int, *, backward: bool) -> Iterator[None]:
        """Record one of several repetitions."""
        start = len(self.events)
        yield
        if len(self.events) > start:
            self._bodies.append(_Body(group, times, backward, start, len(self.events)))

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Phase, int, int]]:
        """The events of a range by phase; those of a part without phases are the build's."""
        begun = [*(self.phases or [(0, Phase.BUILD)]), (len(self.events), Phase.BUILD)]
        for (first, phase), (last, _) in pairwise(begun):
            if max(first, start) <= min(last, stop):
                yield phase, max(first, start), min(last, stop)

    def unfolded(self) -> "Recording":
        """The same without repetitions: each has blocks of its own, and frees what the one before left for it."""
        return _Unfolding(self, self._bodies).result if self._bodies else self


def recording_after(before: Sequence[Recording]) -> Recording:
    """A recording of what follows others."""
    return Recording(modules=before[-1].modules if before else ())


class _Unfolding:
    """Writes repetitions out."""

    def __init__(self, folded: Recording, bodies: Sequence[_Body]) -> None:
        self._folded, self.result = folded, Recording()
        # the body that allocates and the one that frees each block; None for what is not in a body
        self._made: dict[int, _Body | None] = {}
        self._freed: dict[int, _Body | None] = {}
        at = 0
        parts: list[tuple[_Body | None, int, int]] = []
        for body in bodies:
            parts += ((None, at, body.start), (body, body.start, body.end))
            at = body.end
        parts.append((None, at, len(folded.events)))
        for owner, start, end in parts:
            for event in folded.events[start:end]:
                if event >= 0:
                    self._made[event] = owner
                else:
                    self._freed[~event] = owner
        self._partners = dict(self._paired(bodies))
        self._carried = set(self._partners.values())
        # the blocks of each recorded one, by repetition in the order in which they run
        self._blocks: dict[int, dict[int, int]] = {}
        marks = sorted({*folded.micro_batches, *(at for at, _ in folded.phases)})
        moved: dict[int, int] = {}
        for owner, start, end in parts:
            if owner is not None:
                self._write_body(owner)
                continue
            at = start
            while marks and at <= marks[0] <= end:
                self._write(at, marks[0])
                at = marks.pop(0)
                moved[at] = len(self.result.events)
            self._write(at, end)
        self.result.micro_batches = [moved[at] for at in folded.micro_batches]
        self.result.phases = [(moved[at], phase) for at, phase in folded.phases]

    def _paired(self, bodies: Sequence[_Body]) -> Iterator[tuple[int, int]]:
        """The blocks that bodies free but other code allocated, each with the one that the next repetition frees."""
        folded, left = self._folded, defaultdict[tuple[int, bool, int], list[int]](list)
        for number, made in self._made.items():
            freed = self._freed.get(number)
            own = made is None or (freed is not None and freed.group == made.group)
            if made is not None and not own and folded.roles[number] is not Role.GRADIENTS:
                left[made.group, made.backward, folded.sizes[number]].append(number)
        position = {event: at for at, event in enumerate(folded.events) if event >= 0}
        for number, freed in self._freed.items():
            made = self._made[number]
            if freed is None or (made is not None and made.group == freed.group):
                continue
            # it comes from before the forward pass, or from between the passes
            forward = [body.start for body in bodies if body.group == freed.group and not body.backward]
            backward = position[number] > max((start for start in forward if start <= freed.start), default=-1)
            waiting = left[freed.group, backward, folded.sizes[number]]
            found = next((each for each in waiting if position[each] > position[number]), None)
            if found is not None:
                waiting.remove(found)
                yield number, found

    def _write(self, start: int, end: int) -> None:
        for event in self._folded.events[start:end]:
            if event >= 0:
                self._blocks[event] = {0: self._copy(event)}
            else:
                self._free_after(~event)

    def _write_body(self, body: _Body) -> None:
        folded, result = self._folded, self.result
        events = folded.events[body.start : body.end]
        numbers = [event for event in events if event >= 0]
        places = {number: at for at, number in enumerate(numbers)}
        # blocks that are freed in the repetition that allocates them, and the others
        inner = {number for number in numbers if self._freed.get(number) is body}
        outer = [number for number in numbers if number not in inner]
        plan = [
            (event, places[event] if event >= 0 else ~places[~event] if ~event in inner else None) for event in events
        ]
        sizes = [folded.sizes[number] for number in numbers]
        roles = [folded.roles[number] for number in numbers]
        streams = [folded.streams[number] for number in numbers]
        places_of = [folded.places[number] for number in numbers]
        append = result.events.append
        for run in range(body.times):
            first = len(result.sizes)
            result.sizes += sizes
            result.roles += roles
            result.streams += streams
            result.places += places_of
            for number in outer:
                self._blocks.setdefault(number, {})[run] = first + places[number]
            for event, place in plan:
                if place is None:
                    self._free_within(~event, body, run)
                else:
                    append(first + place if place >= 0 else place - first)
            result.kept.update(first + places[number] for number in outer if number in folded.kept)

    def _copy(self, number: int) -> int:
        folded = self._folded
        return self.result.allocate(
            folded.sizes[number],
            folded.roles[number],
            folded.streams[number],
            kept=number in folded.kept,
            place=folded.places[number],
        )

    def _free_within(self, number: int, body: _Body, run: int) -> None:
        made = self._made[number]
        if made is not None and made.group == body.group:
            # the passes run over the layers in one or the other order
            self._free(number, run if made.backward == body.backward else body.times - 1 - run)
            return
        partner = self._partners.get(number)
        if partner is None:
            self._free_after(number)
            return
        source = self._made[partner]
        assert source is not None
        before = (run if source.backward == body.backward else body.times - 1 - run) - 1
        if before < 0:
            self._free_after(number)
        else:
            self._free(partner, before)

    def _free_after(self, number: int) -> None:
        """Free what the last repetition left for others, or what all of them left."""
        runs = list(self._blocks[number])
        for run in runs[-1:] if number in self._carried else runs:
            self._free(number, run)

    def _free(self, number: int, run: int) -> None:
        block = self._blocks[number].pop(run, None)
        if block is not None:
            self.result.free(block)
