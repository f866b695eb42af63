"""What the computation of each suggestion reads: the replay, roles, passes of layers, and facts about the program."""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ligerprof.analyzers.attribution import frames
from ligerprof.analyzers.attribution.blocks import Attribution
from ligerprof.analyzers.attribution.layers import NO_LAYER
from ligerprof.analyzers.attribution.phases import DeviceBlocks, EventPhases, are_codes_of, phase_code
from ligerprof.analyzers.attribution.stacks import StackReader
from ligerprof.roles import ROLE_CODES, ROLES, STEP_PHASES, Phase, Role
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.trace import Flags, Int64s, integer_of
from ligerprof.torch_memory.allocator.settings import SizeRules
from ligerprof.words import ExplainedWord


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """An allocation that failed.

    Attributes:
        moment: the moment before it.
        size_bytes: of the block that it needed.
        role: the role of an earlier allocation by the same stack, None if there is none.
        limit_bytes: allocated bytes that fit: what was reserved, and what the device had left if that was too little.
    """

    moment: int
    size_bytes: int
    role: Role | None
    limit_bytes: int


def find_request(attribution: Attribution, event: int, peak_moment: int) -> Request:
    """Read the failed allocation's event."""
    replayed = attribution.replayed
    found = replayed.trace[event]
    requested_bytes, free_bytes = (integer_of(found, key) or 0 for key in ("size", "device_free"))
    # with more than that on the device, a limit on the process was reached
    available = free_bytes if free_bytes < requested_bytes else 0
    return Request(
        moment=event,
        size_bytes=SizeRules().round_request(requested_bytes),
        role=_role(attribution, found.get("frames"), peak_moment),
        limit_bytes=int(replayed.reserved_bytes[: event + 1].max()) + available,
    )


def _role(attribution: Attribution, frames: object, peak_moment: int) -> Role | None:
    stack = StackReader().read(frames)
    if not stack.calls:
        return None
    sites = [number for number, site in enumerate(attribution.call_sites.sites) if site.stack.calls == stack.calls]
    blocks = np.flatnonzero(np.isin(attribution.call_sites.site_of, sites))
    return attribution.roles_of(blocks[-1:], peak_moment)[0] if len(blocks) else None


# indices of moments, or all moments
Window = Int64s | slice

_UNKNOWN = -1
# smaller blocks need no role: a hundred thousand of them would be needed to matter
_SMALL_SHARE = 100_000
_MOST_ROUNDS = 40


class Edit:
    """Changes to the allocated bytes of a recording; each method returns the edit, for the next change.

    Attributes:
        request_divisor: the change divides the failed request by this number; 0 if it avoids the request.
    """

    def __init__(self, replayed: Replay) -> None:
        self._replayed = replayed
        self._changes = np.zeros(replayed.last_moment + 2, dtype=np.int64)
        self._spikes: list[tuple[Int64s, Int64s]] = []
        self._sizes = replayed.block_bytes
        self.request_divisor = 1

    def hold(self, size_bytes: Int64s | int, starts: Int64s, stops: Int64s) -> "Edit":
        """Add blocks that live from each start up to the moment before each stop."""
        sizes = np.where(stops > starts, size_bytes, 0)
        np.add.at(self._changes, starts, sizes)
        np.add.at(self._changes, stops, -sizes)
        return self

    def release(self, size_bytes: Int64s | int, starts: Int64s, stops: Int64s) -> "Edit":
        """Take blocks away from each start up to the moment before each stop."""
        return self.hold(-np.asarray(size_bytes, dtype=np.int64), starts, stops)

    def remove(self, blocks: Int64s) -> "Edit":
        """Take blocks away for their whole lives."""
        return self.release(self._replayed.block_bytes[blocks], self.starts(blocks), self.stops(blocks))

    def resize(self, blocks: Int64s, divisor: int) -> "Edit":
        """Divide the size of blocks."""
        return self.set_size(blocks, self._replayed.block_bytes[blocks] // divisor)

    def set_size(self, blocks: Int64s, sizes: Int64s) -> "Edit":
        """Give blocks other sizes."""
        self._sizes = self._sizes.copy()
        self._sizes[blocks] = sizes
        return self.release(self._replayed.block_bytes[blocks] - sizes, self.starts(blocks), self.stops(blocks))

    def sizes(self, blocks: Int64s) -> Int64s:
        """The sizes of blocks, as far as they have been given others."""
        return self._sizes[blocks]

    def end(self, blocks: Int64s, stops: Int64s) -> "Edit":
        """End blocks at the given moments, if they live longer."""
        ends = self.stops(blocks)
        return self.release(self._replayed.block_bytes[blocks], np.minimum(stops, ends), ends)

    def add(self, other: "Edit") -> None:
        """Add another edit of the same recording."""
        self._changes += other._changes
        self._spikes += other._spikes

    def spike(self, moments: Int64s, size_bytes: Int64s) -> None:
        """Add bytes at single moments, such as the temporary tensors of a kernel."""
        self._spikes.append((moments, size_bytes))

    def starts(self, blocks: Int64s) -> Int64s:
        """The first moment of each block."""
        return self._replayed.allocated_by[blocks] + 1

    def stops(self, blocks: Int64s) -> Int64s:
        """The moment after the last one of each block."""
        freed = self._replayed.freed_by[blocks]
        return np.where(freed < 0, self._replayed.last_moment, freed) + 1

    def allocated_bytes(self, request: Request | None) -> Int64s:
        """Allocated bytes at each moment after the change, with spikes and the allocation that failed."""
        allocated = np.cumsum(self._changes[:-1])
        allocated += self._replayed.allocated_bytes
        highest = allocated.copy() if self._spikes else allocated
        for at, size_bytes in self._spikes:
            np.maximum.at(highest, at, allocated[at] + size_bytes)
        if request is not None and self.request_divisor:
            requested = allocated[request.moment] + request.size_bytes // self.request_divisor
            highest[request.moment] = max(highest[request.moment], requested)
        return highest

    def highest(self, window: Window, request: Request | None) -> tuple[int, int]:
        """The peak after the change, and its moment."""
        allocated = self.allocated_bytes(request)
        place = int(np.argmax(allocated[window]))
        moment = range(len(allocated))[window][place] if isinstance(window, slice) else int(window[place])
        return int(allocated[moment]), moment


class RoleBook:
    """The roles of blocks at any moment, as far as changes need them.

    A block has the role that attribution gives it if it was live at a moment that was looked at. Any other block has
    the role of a block with the same call site and size.

    Attributes:
        least_bytes: smaller blocks need no role.
    """

    def __init__(self, attribution: Attribution, peak_moment: int) -> None:
        self._attribution, self._peak_moment = attribution, peak_moment
        self._replayed = attribution.replayed
        self._alike = attribution.call_sites.size_at_place
        self._codes = np.full(len(self._alike), _UNKNOWN, dtype=np.int8)
        self._codes_of_alike = np.full(int(self._alike.max(initial=-1)) + 1, _UNKNOWN, dtype=np.int8)
        self._all_codes: npt.NDArray[np.int8] | None = None
        self._found: dict[tuple[Role, ...], Int64s] = {}
        self.least_bytes = int(self._replayed.allocated_bytes[peak_moment]) // _SMALL_SHARE
        self._looked_at: set[int] = set()
        self.learn(peak_moment)

    def learn(self, moment: int) -> bool:
        """Find the roles of the blocks that are live at a moment; False if they are known already."""
        if moment in self._looked_at:
            return False
        self._looked_at.add(moment)
        live = self._replayed.live_at(moment)
        unknown = live[(self._codes[live] == _UNKNOWN) & (self._replayed.block_bytes[live] >= self.least_bytes)]
        found = self._attribution.role_codes_of(unknown, self._peak_moment).astype(np.int8)
        self._codes[unknown] = found
        alike = self._alike[unknown]
        first = self._codes_of_alike[alike] == _UNKNOWN
        self._codes_of_alike[alike[first]] = found[first]
        self._all_codes = None
        return True

    def blocks(self, *roles: Role) -> Int64s:
        """The blocks that have one of the roles."""
        codes = self._known_codes()
        if roles not in self._found:
            self._found[roles] = np.flatnonzero(_is_one_of(roles)[codes])
        return self._found[roles]

    def live(self, moment: int, *roles: Role) -> Int64s:
        """The blocks with one of the roles that are live at a moment."""
        live = self._replayed.live_at(moment)
        return live[_is_one_of(roles)[self._known_codes()[live]]]

    def bytes_at(self, moment: int, *roles: Role) -> int:
        """Bytes of these roles at a moment."""
        return int(self._replayed.block_bytes[self.live(moment, *roles)].sum())

    def _known_codes(self) -> npt.NDArray[np.int8]:
        if self._all_codes is None:
            self._all_codes = np.where(self._codes == _UNKNOWN, self._codes_of_alike[self._alike], self._codes)
            self._found.clear()
        return self._all_codes


def _is_one_of(roles: Sequence[Role]) -> Flags:
    """Whether each code is that of one of the roles; the last one is of unknown roles."""
    chosen = np.zeros(len(ROLES) + 1, dtype=bool)
    chosen[[ROLE_CODES[role] for role in roles]] = True
    return chosen


def peak_after(change: Callable[[], Edit | None], case: "Case") -> int | None:
    """The peak after a change, None if the change has no effect that can be computed.

    The new peak may be at a moment where the roles of blocks are not known yet, so the change is made again until
    they are.
    """
    for _ in range(_MOST_ROUNDS):
        edit = change()
        if edit is None:
            return None
        peak_bytes, moment = edit.highest(case.window, case.request)
        if not case.book.learn(moment):
            return peak_bytes
    return None


# a layer's output is its last tensor that lives on, unless that is far smaller than what the layer saves
_OUTPUT_SHARE = 16
_NONE = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPasses:
    """Forward passes of layers, in order; columns have one entry per pass.

    Attributes:
        span: the span of the forward phase that each pass belongs to.
        first: event of its first allocation.
        end: event of the first allocation after it, or the end of the span.
        output: block of its output, -1 if unknown.
        rise_bytes: how far allocated memory rose within the pass.
        backward_first: event that first frees a block that the pass saved, in the next backward phase; -1 without.
        backward_last: event that frees the last one.
        recompute: the last event before `backward_first` at which backward of later operations frees a block.
        saved: blocks that live on after their pass, outputs excluded.
        saved_by: the pass of each of them.
    """

    span: Int64s
    first: Int64s
    end: Int64s
    output: Int64s
    output_bytes: Int64s
    rise_bytes: Int64s
    backward_first: Int64s
    backward_last: Int64s
    recompute: Int64s
    saved: Int64s
    saved_by: Int64s

    def __len__(self) -> int:
        return len(self.span)


def find_passes(device: DeviceBlocks, layers: Int64s) -> LayerPasses:
    """Find the passes; `layers` has the layer of each block, -1 for none."""
    replayed, phases = device.replayed, device.phases
    forward = np.flatnonzero(device.in_phase(Phase.FORWARD))
    places = np.flatnonzero(layers[forward] != NO_LAYER)
    blocks = forward[places]
    spans = device.spans[blocks]
    if not len(blocks):
        return LayerPasses(**dict.fromkeys(LayerPasses.__slots__, blocks))
    is_first = np.append(True, (np.diff(layers[blocks]) != 0) | (np.diff(spans) != 0))
    starts = np.flatnonzero(is_first)
    pass_of = np.cumsum(is_first) - 1
    span = spans[starts]
    first = replayed.allocated_by[blocks[starts]]
    end = _ends(replayed, phases, forward, places[np.append(starts[1:], len(blocks)) - 1], span)
    freed = np.where(replayed.freed_by[blocks] < 0, len(replayed.trace), replayed.freed_by[blocks])
    lives_on = freed >= end[pass_of]
    sizes = replayed.block_bytes[blocks]
    largest = np.maximum.reduceat(np.where(lives_on, sizes, 0), starts)
    may_be_output = lives_on & (sizes * _OUTPUT_SHARE >= largest[pass_of])
    output = np.maximum.reduceat(np.where(may_be_output, np.arange(len(blocks)), _NONE), starts)
    is_output = np.zeros(len(blocks), dtype=bool)
    is_output[output[output >= 0]] = True
    freed_span = np.append(phases.spans, phases.last_span + 1)[freed]
    is_saved = lives_on & ~is_output & (freed_span > spans)
    in_backward = is_saved & (freed_span == _next_backward(phases)[span][pass_of])
    backward_first = np.minimum.reduceat(np.where(in_backward, freed, len(replayed.trace)), starts)
    backward_last = np.maximum.reduceat(np.where(in_backward, freed, _NONE), starts)
    backward_first = np.where(backward_last == _NONE, _NONE, backward_first)
    return LayerPasses(
        span=span,
        first=first,
        end=end,
        output=np.where(output >= 0, blocks[output], _NONE),
        output_bytes=np.where(output >= 0, sizes[output], 0),
        rise_bytes=_rises(replayed, first, end),
        backward_first=backward_first,
        backward_last=backward_last,
        recompute=last_before(frees_of_saved(device), backward_first),
        saved=blocks[is_saved],
        saved_by=pass_of[is_saved],
    )


def _ends(replayed: Replay, phases: EventPhases, forward: Int64s, last_places: Int64s, span: Int64s) -> Int64s:
    """The event of the next allocation of forward after each pass, or the end of its span."""
    events = np.append(replayed.allocated_by[forward], len(replayed.trace))
    span_ends = np.searchsorted(phases.spans, span, "right")
    return np.minimum(events[last_places + 1], span_ends)


def _next_backward(phases: EventPhases) -> Int64s:
    """The first span of backward after each span; past the last span if there is none."""
    starts = phases.span_starts
    backward = np.flatnonzero(phases.codes[starts] == phase_code(Phase.BACKWARD))
    after = np.searchsorted(backward, np.arange(len(starts)), "right")
    return np.append(backward, phases.last_span + 2)[after]


def _rises(replayed: Replay, first: Int64s, end: Int64s) -> Int64s:
    """The highest allocated bytes from the first event of each pass to its end, above those before it."""
    bounds = np.column_stack([first, end + 1]).ravel()
    highest = np.maximum.reduceat(np.append(replayed.allocated_bytes, 0), bounds)[::2]
    return highest - replayed.allocated_bytes[first]


def frees_of_saved(device: DeviceBlocks) -> Int64s:
    """Events of backward that free a block of forward, ascending."""
    freed = device.replayed.freed_by[device.in_phase(Phase.FORWARD)]
    return np.sort(freed[device.phases.codes_of(freed) == phase_code(Phase.BACKWARD)])


def last_before(events: Int64s, limits: Int64s) -> Int64s:
    """The last of the events before each limit, or the limit itself if there is none."""
    place = np.searchsorted(events, limits, "left") - 1
    if not len(events):
        return limits
    return np.where(place >= 0, events[np.maximum(place, 0)], limits)


class Framework(ExplainedWord):
    """Whose settings a reader can change."""

    LIGERPROF = "ligerprof", "ligerprof step"
    AXOLOTL = "axolotl", "axolotl's YAML"
    LLAMA_FACTORY = "llama-factory", "LLaMA-Factory's YAML"
    TRL = "trl", "the arguments of a TRL trainer, such as SFTConfig"
    TRAINER = "transformers", "transformers.TrainingArguments"
    LIGHTNING = "lightning", "Lightning"
    DEEPSPEED = "deepspeed", "DeepSpeed's JSON"
    FSDP2 = "fsdp2", "torch's fully_shard"
    FSDP1 = "fsdp1", "torch's FullyShardedDataParallel"
    DDP = "ddp", "torch's DistributedDataParallel"
    ACCELERATE = "accelerate", "accelerate"
    MODEL = "transformers-model", "a transformers model in a loop of its own"
    TORCH = "torch", "plain torch"


_WITHOUT_CODE = (Framework.AXOLOTL, Framework.LLAMA_FACTORY)
_INSTALLED = r"(?:^|/)"
# the first that matches runs the training loop
_LOOPS = (
    (Framework.LIGERPROF, r"ligerprof/runs/"),
    (Framework.AXOLOTL, rf"{_INSTALLED}axolotl/"),
    (Framework.LLAMA_FACTORY, rf"{_INSTALLED}llamafactory/"),
    (Framework.TRL, rf"{_INSTALLED}trl/(?:\w+/)*\w*trainer"),
    (Framework.TRAINER, rf"{_INSTALLED}transformers/trainer\w*\.py$"),
    (Framework.LIGHTNING, rf"{_INSTALLED}(?:lightning|pytorch_lightning|lightning_fabric)/"),
    (Framework.ACCELERATE, rf"{_INSTALLED}accelerate/(?:accelerator|utils/operations)\.py$"),
)
_ENGINES = (
    (Framework.DEEPSPEED, rf"{_INSTALLED}deepspeed/runtime/"),
    (Framework.FSDP2, r"torch/distributed/(?:fsdp/_fully_shard|_composable/fsdp)/"),
    (Framework.FSDP1, r"torch/distributed/fsdp/(?:fully_sharded_data_parallel|_runtime_utils|_flat_param)\.py$"),
    (Framework.DDP, r"torch/nn/parallel/distributed\.py$"),
)
_MODEL = rf"{_INSTALLED}transformers/models/"
_MODEL_TYPE = rf"{_MODEL}(\w+)/modeling_"
_PEFT = rf"{_INSTALLED}peft/tuners/"
_COMPILED = r"torch/_inductor/|/torchinductor_|torch/_functorch/_aot"


class RecordedProgram:
    """What the stacks of a recording show about its program.

    Args:
        files: the files of all Python calls, installed packages by their package's path.
        calls: all of them as `file:function`.

    Attributes:
        loop: the framework that runs the training loop, None for a loop of its own.
        engine: the engine that shards or replicates the model.
        checkpoints: whether gradient checkpointing runs.
        has_adapters: whether peft's adapters are trained.
        has_fused_loss: whether a loss computes logits chunk by chunk.
        has_cross_entropy: whether torch's cross-entropy runs.
        generates: whether the recording is of text generation.
        evaluates: whether a trainer evaluates in the recording.
        is_compiled: whether torch.compile's code runs.
        model_types: the `model_type` of each transformers model that runs.
    """

    def __init__(self, *, files: frozenset[str], calls: frozenset[str]) -> None:
        self._files, self._calls = files, calls
        self.loop, self.engine = (
            next((one for one, pattern in rows if self.has_file(pattern)), None) for rows in (_LOOPS, _ENGINES)
        )
        self.checkpoints = self.has_file(f"{frames.CHECKPOINT}$")
        self.has_adapters = self.has_file(_PEFT)
        self.has_fused_loss = self.has_call(rf"{frames.FUSED_LOSS}|chunked")
        self.has_cross_entropy = self.has_call(f"{frames.CROSS_ENTROPY}|{frames.LANGUAGE_MODEL_LOSS}")
        self.generates = self.has_file(frames.GENERATION)
        self.evaluates = self.has_call(frames.EVALUATION)
        self.is_compiled = self.has_file(_COMPILED)
        self.model_types = frozenset(match.group(1) for match in map(re.compile(_MODEL_TYPE).search, files) if match)

    @property
    def frameworks(self) -> tuple[Framework, ...]:
        """Everything that the program uses, the outermost first: how a change is made is looked up in this order.

        The users of some programs change their settings, not code; a trainer's settings contain DeepSpeed's.
        """
        if self.loop is Framework.LIGERPROF:
            return (self.loop,)
        found = [self.loop, self.engine]
        if self.loop in _WITHOUT_CODE:
            found = [self.loop, self.engine if self.engine is Framework.DEEPSPEED else None]
        else:
            found += [Framework.MODEL if self.has_file(_MODEL) else None, Framework.TORCH]
        return tuple(one for one in found if one is not None)

    def has_file(self, pattern: str) -> bool:
        """Whether a call's file matches a regular expression."""
        return any(re.search(pattern, file) for file in self._files)

    def has_call(self, pattern: str) -> bool:
        """Whether a call, as `file:function`, matches a regular expression."""
        return any(re.search(pattern, call) for call in self._calls)


def read_program(attribution: Attribution) -> RecordedProgram:
    """Read the program off the stacks of its forward and backward passes and optimizer steps, or off all stacks."""
    sites, in_steps = attribution.call_sites, attribution.device_blocks.in_phase(*STEP_PHASES)
    chosen = np.flatnonzero(np.bincount(sites.site_of[in_steps])).tolist() or range(len(sites.sites))
    calls = {call for site in chosen for call in sites.sites[site].stack.calls}
    return RecordedProgram(
        files=frozenset(call.file for call in calls), calls=frozenset(f"{call.file}:{call.function}" for call in calls)
    )


FoundT = TypeVar("FoundT")

# the first steps differ from each other, later ones do not
_LEARNED_SPANS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A recording whose peak is to be lowered.

    Attributes:
        attribution: of the recording, up to the failure if memory ran out.
        whole: of the whole recording, which shows what the program does.
        window: the moments that are searched for the peak.
        failed: the event of the allocation that failed, None if all succeeded.
    """

    attribution: Attribution
    whole: Attribution
    window: Window
    peak_moment: int
    failed: int | None = None
    _found: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def replayed(self) -> Replay:
        """The replayed device."""
        return self.attribution.replayed

    @cached_property
    def program(self) -> RecordedProgram:
        """What the stacks show about the program."""
        return read_program(self.whole)

    @cached_property
    def request(self) -> Request | None:
        """The allocation that failed."""
        return None if self.failed is None else find_request(self.attribution, self.failed, self.peak_moment)

    @cached_property
    def book(self) -> RoleBook:
        """The roles of blocks."""
        return RoleBook(self.attribution, self.peak_moment)

    @cached_property
    def passes(self) -> LayerPasses:
        """The forward passes of layers."""
        return find_passes(self.attribution.device_blocks, self.attribution.program.layers)

    @cached_property
    def trains_model(self) -> bool:
        """Whether backward runs in the recording, or would have run if memory had not run out in the first forward."""
        if (self.whole.phases.codes == phase_code(Phase.BACKWARD)).any():
            return True
        if self.failed_phase is Phase.FORWARD and self.attribution.phases.stamped:
            # of a program that has generated what it trains on
            return True
        ran_once = len(self.spans_of_phase(Phase.FORWARD)) == 1
        return self.request is not None and ran_once and not self.program.generates

    @cached_property
    def backwards(self) -> list[tuple[int, int]]:
        """First event and end of each backward phase.

        Without stamps or annotations, the phase ends after its last allocation: the frees that follow may belong to
        the optimizer step.
        """
        events, spans = self.replayed.allocated_by, self.spans_of_phase(Phase.BACKWARD)
        if self.attribution.phases.stamped or len(self.attribution.phases.optimizer_starts):
            return spans
        return [(start, int(events[np.searchsorted(events, end) - 1]) + 1) for start, end in spans]

    @cached_property
    def gradients(self) -> Int64s:
        """The blocks of gradients: those that are live where backward phases end."""
        for _, end in self.backwards[:_LEARNED_SPANS]:
            self.book.learn(end)
        return self.book.blocks(Role.GRADIENTS)

    @cached_property
    def evaluation(self) -> Int64s:
        """Blocks that an evaluation allocated, by a recorder's stamps or the calls of a trainer."""
        stamped = self._stamped(Phase.EVALUATION)
        return np.unique(np.append(stamped, self.blocks_from(frames.EVALUATION))) if self.program.evaluates else stamped

    @cached_property
    def generation(self) -> Int64s:
        """Blocks that a generation allocated by a recorder's stamps, but none within a trainer's evaluation."""
        stamped = self._stamped(Phase.GENERATION)
        return stamped[~np.isin(stamped, self.evaluation)]

    def runs_in(self, phase: Phase) -> bool:
        """Whether a recorder stamped events with a phase."""
        return bool((self.attribution.phases.shown == phase_code(phase)).any())

    def _stamped(self, phase: Phase) -> Int64s:
        shown = self.attribution.phases.shown_of(self.replayed.allocated_by)
        return np.flatnonzero(are_codes_of(shown, phase))

    @property
    def failed_phase(self) -> Phase | None:
        """The phase in which an allocation failed, as reports name it; None if all succeeded."""
        request = self.request
        return self.attribution.phases.shown_at(request.moment - 1) if request is not None and request.moment else None

    def in_training(self, *roles: Role) -> Int64s:
        """The blocks of some roles that neither an evaluation nor a generation allocated."""
        blocks = self.book.blocks(*roles)
        others = np.append(self.evaluation, self.generation)
        return blocks[~np.isin(blocks, others)] if len(others) else blocks

    def edit(self) -> Edit:
        """An empty edit of the replay."""
        return Edit(self.replayed)

    def divide_request(self, edit: Edit, divisor: int, *roles: Role) -> None:
        """Let an edit divide the failed request, if that is for one of some roles; 0 avoids it."""
        if self.request is not None and self.request.role in roles:
            edit.request_divisor = divisor

    def once(self, find: Callable[..., FoundT], *arguments: Hashable) -> FoundT:
        """The result of `find(self, *arguments)`, kept: a change is made until the roles at its peak are known."""
        key = (find, *arguments)
        if key not in self._found:
            self._found[key] = find(self, *arguments)
        return self._found[key]

    def without(self, *roles: Role) -> Edit:
        """An edit that removes every block of some roles, except those of evaluations."""
        edit = self.edit().remove(self.in_training(*roles))
        self.divide_request(edit, 0, *roles)
        return edit

    def spans_of_phase(self, phase: Phase) -> list[tuple[int, int]]:
        """First event and end of each span of a phase."""
        phases = self.attribution.phases
        chosen = phases.codes[phases.span_starts] == phase_code(phase)
        return list(zip(*(each[chosen].tolist() for each in (phases.span_starts, phases.span_stops)), strict=True))

    @cached_property
    def forward_starts(self) -> Int64s:
        """The first event of each forward phase."""
        return np.array([start for start, _ in self.spans_of_phase(Phase.FORWARD)], dtype=np.int64)

    def made_in(self, phase: Phase, blocks: Int64s) -> Int64s:
        """Those of the blocks that a phase allocated."""
        return blocks[self.attribution.device_blocks.codes[blocks] == phase_code(phase)]

    def end_in_backward(self, blocks: Int64s) -> Flags:
        """Whether backward frees each block."""
        codes = self.attribution.phases.codes_of(self.replayed.freed_by[blocks])
        return are_codes_of(codes, Phase.BACKWARD)

    def allocated_within(self, blocks: Int64s, start: int, end: int) -> Int64s:
        """Those of the ascending blocks that events from `start` up to `end` allocated."""
        return blocks[slice(*np.searchsorted(blocks, np.searchsorted(self.replayed.allocated_by, (start, end))))]

    def blocks_from(self, pattern: str) -> Int64s:
        """Blocks whose stack has a call, as `file:function`, that matches a regular expression."""
        sites = self.attribution.call_sites
        found = [re.search(pattern, site.stack.text, re.MULTILINE) is not None for site in sites.sites]
        return np.flatnonzero(np.array(found, dtype=bool)[sites.site_of])

    def sizes(self, blocks: Int64s | Sequence[int]) -> Int64s:
        """Requested bytes of blocks."""
        return self.replayed.requested_bytes[blocks]
