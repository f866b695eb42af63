"""Count the bytes that a step asks for by role and by part of the model, and record its allocations in order."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ligerprof.analyzers.estimate.places import WHOLE
from ligerprof.analyzers.estimate.recording import Recording
from ligerprof.roles import Phase, Role
from ligerprof.torch_memory.allocator.settings import SizeRules
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


_LOGITS_ROLES = (Role.LOGITS, Role.SHIFT_LOGITS, Role.CE_TEMPORARIES)


_Held = dict[tuple[str, Role], int]


class Meter:
    """Bytes by role and part of the model now, rounded as the allocator rounds, and the most at once since `start`.

    How the allocator places the blocks is left to a replay of the recording.

    Args:
        rules: the allocator's rounding of requests.

    Attributes:
        place: the current part of the model.
        recording: the events so far.
        total_bytes: bytes now.
        peak_bytes: the most at once since `start`.
        logits_peak_bytes: the highest sum of all [T, V] tensors so far.
    """

    def __init__(self, rules: SizeRules) -> None:
        self._rules = rules
        self._held: _Held = {}
        self.place = WHOLE
        self.recording = Recording()
        self.total_bytes = self.peak_bytes = 0
        self.logits_peak_bytes = self._logits_bytes = 0
        # of cuBLAS, for the threads that have not multiplied yet, and of cuBLASLt, which adds biases
        self._workspaces: dict[Phase, int] = {}
        self._lt_workspaces: dict[Phase, int] = {}
        self._thread = Phase.FORWARD

    @property
    def held_places(self) -> dict[str, dict[Role, int]]:
        """Bytes allocated now, by part of the model and role."""
        roles: dict[str, dict[Role, int]] = {}
        for (place, role), size_bytes in self._held.items():
            roles.setdefault(place, {})[role] = size_bytes
        return roles

    def start(self) -> None:
        """Start a new peak from the current bytes."""
        self.peak_bytes = self.total_bytes

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
        outer_bytes, before, total_bytes = self.peak_bytes, dict(self._held), self.total_bytes
        self.start()
        with self.recording.repetition(first_layer, times, backward=backward):
            act()
        # a block of one repetition, such as the gradient that flows on, is freed by the next
        for (place, role), size_bytes in list(self._held.items()):
            change_bytes = size_bytes - before.get((place, role), 0)
            self._count(place if place in places else self.place, role, (times - 1) * change_bytes)
        more_bytes = (times - 1) * (self.total_bytes - total_bytes) // times
        self.peak_bytes = max(outer_bytes, self.peak_bytes, self.peak_bytes + more_bytes, self.total_bytes)

    def take(self, size_bytes: int, role: Role, stream: Stream = Stream.COMPUTE) -> Allocation:
        """Allocate a block with one holder."""
        stays = role is Role.LIBRARY_WORKSPACE
        place = WHOLE if stays else self.place
        number = self.recording.allocate(size_bytes, role, _STREAMS.index(stream), kept=stays, place=place)
        block = Allocation(size_bytes=size_bytes, role=role, place=place, number=number)
        self._change(block, 1)
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
            self._change(block, -1)

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
        """Allocate the workspaces at the first products of each thread: forward's, and that of autograd.

        Args:
            sizes: of all workspaces of a thread: cuBLAS and cuBLASLt have one each.
            cublas_bytes: of cuBLAS's.
        """
        self._workspaces = {thread: min(size, cublas_bytes) for thread, size in sizes.items()}
        self._lt_workspaces = {thread: size - self._workspaces[thread] for thread, size in sizes.items()}

    @contextmanager
    def in_thread(self, thread: Phase) -> Iterator[None]:
        """Multiply in the thread of forward or backward."""
        outer, self._thread = self._thread, thread
        yield
        self._thread = outer

    def multiply(self, *, adds_bias: bool = False) -> None:
        """Run a matrix product, which may add a bias."""
        for waiting in (self._workspaces, self._lt_workspaces) if adds_bias else (self._workspaces,):
            if size_bytes := waiting.pop(self._thread, 0):
                self.take(size_bytes, Role.LIBRARY_WORKSPACE)

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
            self.recording.add(role, times * size_bytes, place or self.place)
            self._count(place or self.place, role, times * size_bytes)
        self._look()

    def settle(self, role: Role, size_bytes: int) -> None:
        """Set a role to these bytes, attributed to the whole model."""
        for place, other in list(self._held):
            if other is role:
                self._count(place, role, -self._held[place, role])
        self.recording.free_all(role)
        self.add({role: size_bytes}, place=WHOLE)

    def _count(self, place: str, role: Role, size_bytes: int) -> None:
        self._held[place, role] = self._held.get((place, role), 0) + size_bytes
        self.total_bytes += size_bytes
        if role in _LOGITS_ROLES:
            self._logits_bytes += size_bytes

    def _change(self, block: Allocation, times: int) -> None:
        self._count(block.place, block.role, times * block.size_bytes)
        rest_bytes = self._rules.round_request(block.size_bytes) - block.size_bytes
        if rest_bytes:
            self._count(block.place, Role.ALLOCATOR_ROUNDING, times * rest_bytes)
        self._look()

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.total_bytes)
        self.logits_peak_bytes = max(self.logits_peak_bytes, self._logits_bytes)
