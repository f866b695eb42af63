"""Count allocated bytes by role and by part of the model, and record the peak."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from ligerprof.analyzers.estimate.places import WHOLE
from ligerprof.analyzers.estimate.recording import Recording
from ligerprof.roles import MemoryBreakdown, Phase, Role
from ligerprof.torch_memory.allocator.settings import SMALL_REQUEST_BYTES, SizeRules
from ligerprof.torch_memory.dtypes import Scratch, together
from ligerprof.words import Word


class Stream(Word):
    """A CUDA stream that memory is allocated on: the allocator serves a stream only from blocks of its own."""

    COMPUTE = "compute"
    CAST = "cast"
    GATHER = "gather"
    REDUCE = "reduce"


_STREAMS = tuple(Stream)


@dataclass(slots=True, eq=False)
class Allocation:
    """One allocation, which is freed with its last holder.

    Attributes:
        place: the part of the model that allocated it.
        number: its number in the recording.
        holders: Python variables, saved tensors and pending gradients that refer to it.
    """

    size_bytes: int
    role: Role
    place: str
    number: int
    holders: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class UnsplitRemainders:
    """Blocks in which the allocator may leave a remainder of up to 1 MiB unsplit.

    Attributes:
        blocks: the number of blocks.
        counted_bytes: remainders included in the count, as on an empty device; cached blocks may fit more tightly.
    """

    blocks: int
    counted_bytes: int


_LOGITS_ROLES = (Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES)


_Key = tuple[str, Role]


@dataclass(slots=True)
class _Moment:
    """What is allocated at one moment.

    Attributes:
        placed: bytes by part of the model and role.
        large_blocks: blocks of the pool in which remainders of up to 1 MiB stay unsplit.
        remainder_bytes: remainders that are included in the count.
    """

    placed: dict[_Key, int] = field(default_factory=dict)
    total_bytes: int = 0
    large_blocks: int = 0
    remainder_bytes: int = 0

    def copy(self) -> "_Moment":
        return _Moment(dict(self.placed), self.total_bytes, self.large_blocks, self.remainder_bytes)

    def plus(self, change: "_Moment", times: int) -> "_Moment":
        placed = dict(self.placed)
        for key, size_bytes in change.placed.items():
            placed[key] = placed.get(key, 0) + times * size_bytes
        return _Moment(
            placed,
            self.total_bytes + times * change.total_bytes,
            self.large_blocks + times * change.large_blocks,
            self.remainder_bytes + times * change.remainder_bytes,
        )

    def moved_to(self, place: str, own: Collection[str]) -> "_Moment":
        """The same with the bytes of places other than `own` at `place`."""
        placed: dict[_Key, int] = {}
        for (where, role), size_bytes in self.placed.items():
            key = (where if where in own else place), role
            placed[key] = placed.get(key, 0) + size_bytes
        return _Moment(placed, self.total_bytes, self.large_blocks, self.remainder_bytes)

    def of_role(self, roles: Collection[Role]) -> int:
        return sum(size_bytes for (_, role), size_bytes in self.placed.items() if role in roles)


class Meter:
    """Allocated bytes by role, now and at the peak since `start`.

    Args:
        rules: the allocator's rounding of requests.

    Attributes:
        place: the current part of the model.
        recording: the events so far.
        logits_peak_bytes: the highest sum of all [T, V] tensors so far.
        folds: whether `repeat` runs one repetition for all.
        states_rounding: of the optimizer's states, where their blocks are known.
    """

    folds = True
    states_rounding: Mapping[Role, int] = MappingProxyType({})

    def __init__(self, rules: SizeRules) -> None:
        self._rules = rules
        self._now, self._peak = _Moment(), _Moment()
        self.place = WHOLE
        self.recording = Recording()
        self.logits_peak_bytes = self._logits_bytes = 0
        # of cuBLAS, for the threads that have not multiplied yet
        self._workspaces: dict[Phase, int] = {}
        self._cublas_bytes = 0
        self._thread = Phase.FORWARD

    @property
    def total_bytes(self) -> int:
        """Bytes allocated now."""
        return self._now.total_bytes

    @property
    def held(self) -> dict[Role, int]:
        """Bytes allocated now, by role."""
        return _by_role(self._now)

    @property
    def held_places(self) -> dict[str, dict[Role, int]]:
        """Bytes allocated now, by part of the model and role."""
        return _by_place(self._now)

    def start(self) -> None:
        """Start a new peak from the current bytes."""
        self._peak = self._now.copy()

    def peak(self) -> MemoryBreakdown:
        """The peak since `start`, by role."""
        return MemoryBreakdown(roles=_by_role(self._peak))

    def peak_places(self) -> dict[str, MemoryBreakdown]:
        """The peak by part of the model."""
        return {place: MemoryBreakdown(roles=held) for place, held in _by_place(self._peak).items()}

    def peak_remainders(self) -> UnsplitRemainders:
        """Unsplit remainders at the peak."""
        return UnsplitRemainders(blocks=self._peak.large_blocks, counted_bytes=self._peak.remainder_bytes)

    def add_remainders(self, remainders: UnsplitRemainders) -> None:
        """Count the unsplit remainders of the blocks that the next `add` allocates."""
        self._now.large_blocks += remainders.blocks
        self._now.remainder_bytes += remainders.counted_bytes

    def repeat(
        self,
        times: int,
        act: Callable[[], None],
        places: Collection[str] = (),
        *,
        first_layer: int = 0,
        backward: bool = False,
    ) -> None:
        """Act once for `times` repetitions that are alike, and count what each of them changes.

        The highest moment is in the first repetition or, if each leaves more than it found, in the last one.

        Args:
            places: the parts of the model that the repetitions are of; the current one in the end is one of them.
            first_layer: the first of the layers that the repetitions are of.
            backward: whether the last layers come first.
        """
        if times == 1:
            act()
            return
        outer, before = self._peak, self._now.copy()
        self.start()
        with self.recording.repetition(first_layer, times, backward=backward):
            act()
        # a block of one repetition, such as the gradient that flows on, is freed by the next
        change = self._now.plus(before, -1).moved_to(self.place, places)
        self._now = self._now.plus(change, times - 1)
        candidates = (outer, self._peak, self._peak.plus(change, times - 1), self._now.copy())
        self._peak = max(candidates, key=lambda moment: moment.total_bytes)
        self._logits_bytes = self._now.of_role(_LOGITS_ROLES)

    def take(self, size_bytes: int, role: Role, stream: Stream = Stream.COMPUTE) -> Allocation:
        """Allocate a block with one holder."""
        stays = role is Role.LIBRARY_WORKSPACE
        number = self.recording.allocate(size_bytes, role, _STREAMS.index(stream), kept=stays)
        block = Allocation(size_bytes=size_bytes, role=role, place=self.place, number=number)
        self._now.large_blocks += size_bytes > SMALL_REQUEST_BYTES
        self._change(block, size_bytes, self._served_bytes(block))
        return block

    def keep(self, block: Allocation) -> Allocation:
        """Add a holder."""
        block.holders += 1
        return block

    def drop(self, block: Allocation) -> None:
        """Remove a holder; the last one frees the block."""
        block.holders -= 1
        if block.holders == 0:
            self.recording.free(block.number)
            self._now.large_blocks -= block.size_bytes > SMALL_REQUEST_BYTES
            self._change(block, -block.size_bytes, -self._freed_bytes(block))

    def _served_bytes(self, block: Allocation) -> int:
        """Bytes of the allocator's block for a new allocation."""
        return self._rules.round_request(block.size_bytes)

    def _freed_bytes(self, block: Allocation) -> int:
        """Bytes of the allocator's block of an allocation that ends."""
        return self._rules.round_request(block.size_bytes)

    def touch(self, size_bytes: int, role: Role) -> None:
        """Allocate and free a temporary."""
        if size_bytes:
            self.drop(self.take(size_bytes, role))

    def run_scratch(self, scratch: int | Scratch, role: Role, leading: Sequence[Allocation] = ()) -> list[Allocation]:
        """Allocate and free the temporaries of an operator, one block or blocks in their order; returns what is left.

        Args:
            leading: what was left before.
        """
        held = list(leading)
        if not scratch:
            return held
        for size_bytes in together(scratch) if isinstance(scratch, int) else scratch:
            if size_bytes > 0:
                held.append(self.take(size_bytes, role))
            elif size_bytes < 0:
                oldest = next(block for block in held if block.size_bytes == -size_bytes)
                held.remove(oldest)
                self.drop(oldest)
        return held

    def expect_workspaces(self, sizes: Mapping[Phase, int], cublas_bytes: int) -> None:
        """Allocate the workspaces at the first matrix product of each thread: forward's, and that of autograd.

        Args:
            sizes: of all workspaces of a thread: cuBLAS and cuBLASLt have one each.
            cublas_bytes: of cuBLAS's.
        """
        self._workspaces, self._cublas_bytes = dict(sizes), cublas_bytes

    @contextmanager
    def in_thread(self, thread: Phase) -> Iterator[None]:
        """Multiply in the thread of forward or backward."""
        outer, self._thread = self._thread, thread
        yield
        self._thread = outer

    def multiply(self) -> None:
        """Run a matrix product."""
        size_bytes = self._workspaces.pop(self._thread, 0)
        first_bytes = min(size_bytes, self._cublas_bytes)
        for part_bytes in (first_bytes, size_bytes - first_bytes):
            if part_bytes:
                self.take(part_bytes, Role.LIBRARY_WORKSPACE)

    def ran(self, operation: object) -> None:
        """An operation has run; `step_time` counts its work."""

    def asked(self) -> None:
        """Selective checkpointing has been asked whether it keeps an operator's output, or had it already."""

    def offloaded(self, size_bytes: int, *, to_host: bool) -> None:
        """A saved tensor is copied to main memory, or back."""

    def differentiated(self, operation: object) -> None:
        """The gradients of an operation have been computed."""

    def summed(self, size_bytes: int) -> None:
        """A gradient of this size has been added to another."""

    def add(self, roles: Mapping[Role, int], times: int = 1, place: str | None = None) -> None:
        """Add bytes whose rounding is already counted, such as those that a decoder layer leaves behind."""
        for role, size_bytes in roles.items():
            self.recording.add(role, times * size_bytes)
            self._count(place or self.place, role, times * size_bytes)
        self._look()

    def settle(self, role: Role, size_bytes: int) -> None:
        """Set a role to these bytes, attributed to the whole model."""
        for place, other in list(self._now.placed):
            if other is role:
                self._count(place, role, -self._now.placed[place, role])
        self.recording.free_all(role)
        self.add({role: size_bytes}, place=WHOLE)

    def _count(self, place: str, role: Role, size_bytes: int) -> None:
        placed = self._now.placed
        placed[place, role] = placed.get((place, role), 0) + size_bytes
        self._now.total_bytes += size_bytes
        if role in _LOGITS_ROLES:
            self._logits_bytes += size_bytes

    def _change(self, block: Allocation, size_bytes: int, block_bytes: int) -> None:
        self._count(block.place, block.role, size_bytes)
        if block_bytes != size_bytes:
            self._count(block.place, Role.ALLOCATOR_ROUNDING, block_bytes - size_bytes)
        self._look()

    def _look(self) -> None:
        if self._now.total_bytes > self._peak.total_bytes:
            self._peak = self._now.copy()
        self.logits_peak_bytes = max(self.logits_peak_bytes, self._logits_bytes)


def _by_role(moment: _Moment) -> dict[Role, int]:
    roles = dict.fromkeys(Role, 0)
    for (_, role), size_bytes in moment.placed.items():
        roles[role] += size_bytes
    return roles


def _by_place(moment: _Moment) -> dict[str, dict[Role, int]]:
    roles: dict[str, dict[Role, int]] = {}
    for (place, role), size_bytes in moment.placed.items():
        roles.setdefault(place, {})[role] = size_bytes
    return roles
