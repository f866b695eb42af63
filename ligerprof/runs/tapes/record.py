"""Record what a model's forward and backward pass allocate, save and free, from its own code on the simulated GPU."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.models.tape import SCRATCHES, TapeParameter, encoded
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import ROLES, Phase, Role
from ligerprof.runs.activation_offload import checkpointed_layers
from ligerprof.runs.measured.step import PhaseMeter
from ligerprof.runs.recording.saved import SavedTensors, locate_on_cuda
from ligerprof.runs.recording.stamping import Stamper
from ligerprof.runs.simulated.rank import GPU, machine_for, simulated_trainer
from ligerprof.runs.tapes.own import OwnModule, own_trainer
from ligerprof.runs.tapes.recipes import Way
from ligerprof.runs.training import Trainer, make_batch
from ligerprof.simulated_gpu import internals
from ligerprof.simulated_gpu.internals import PRODUCT_INTERNALS
from ligerprof.simulated_gpu.machine import Machine
from ligerprof.snapshots.reader import Snapshot
from ligerprof.snapshots.stamp import with_saved_tensors
from ligerprof.torch_memory import layer_norm, softmax
from ligerprof.torch_memory.allocator.settings import SizeRules
from ligerprof.torch_memory.dtypes import highest_bytes

# name, arguments and named arguments of a call
Scratched = tuple[str, tuple[Any, ...], dict[str, Any]]

# where operators ask what they allocate while they run; the answer here is nothing, and the call is recorded
_ASKED: Mapping[str, tuple[Any, str]] = {
    "reduction": (internals, "reduction_scratch"),
    "layer norm": (layer_norm, "backward_scratch"),
    "softmax": (softmax, "backward_scratch"),
    "safe softmax": (softmax, "safe_scratch"),
    "cumsum": (internals, "cumsum_scratch"),
    "attention forward": (internals, "forward_scratch"),
    "attention backward": (internals, "backward_scratch"),
    "flash splits": (internals, "flash_split_sizes"),
    "embedding": (internals, "embedding_gradient"),
}
_COPY = torch.ops.aten.copy_.default
# through which torch makes nearly all views, in C++ on the machine
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.as_strided.default, torch.ops.aten._reshape_alias.default)
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_ADDING = frozenset({torch.ops.aten.addmm.default, torch.ops.aten.addmm.out})


class UnlikePassesError(Exception):
    """Passes do not allocate in one order, or their sizes follow no polynomial."""


@dataclass(slots=True)
class Recording:
    """One forward pass that keeps nothing for backward, and the backward pass of one that keeps all of it.

    Blocks have the numbers of their allocations, those of backward after those of forward.

    Attributes:
        sizes: requested bytes of each block.
        casts: blocks that are copies of weights in another dtype.
        scratches: the calls that say what operators allocate while they run: name, arguments and named arguments.
        forward: in order ("take", block); ("touch", scratch); ("drop", block) where the last Python variable of a block
            ends; ("save", node, block or None); ("multiply",) at the first product of matrices; ("enter", layer,
            blocks of the arguments, next node) and ("leave", layer, next node).
        graph: blocks that nodes of the graph keep without saving them.
        backward: in order ("run", node or None, operator), ("take", block), ("touch", scratch), ("drop", block) and
            ("arrive", parameter, block).
        unpacked: the same where hooks pack and unpack what is saved, as checkpointing's do.
        order: the order in which blocks of forward and backward begin and end.
        workspaces: bytes of libraries' workspaces by name.
        adds_bias: whether a layer takes cuBLASLt's.
        offloaded_bytes: main memory that saved tensors take.
    """

    sizes: list[int] = field(default_factory=list)
    casts: set[int] = field(default_factory=set)
    scratches: list[Scratched] = field(default_factory=list)
    forward: list[tuple[Any, ...]] = field(default_factory=list)
    graph: list[int] = field(default_factory=list)
    backward: list[tuple[Any, ...]] = field(default_factory=list)
    unpacked: list[tuple[Any, ...]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    workspaces: dict[str, int] = field(default_factory=dict)
    adds_bias: bool = False
    offloaded_bytes: int = 0

    @property
    def numbers(self) -> list[int]:
        """The sizes of blocks, then the integers in the arguments of scratches, then the offloaded bytes."""
        numbers = self.sizes.copy()
        for _, arguments, named in self.scratches:
            encoded((arguments, tuple(named.values())), numbers)
        return [*numbers, self.offloaded_bytes]


class _Watch:
    """Notes what operators do, which blocks begin and end, and which workspaces libraries take.

    Attributes:
        events: receives the notes; None pauses it.
        observe: callback that receives (action, address, bytes) of each event of the allocator but of workspaces.
        in_layer: whether a layer's forward runs.
        adds_bias: whether a layer has multiplied matrices and added a bias in one operator.
        scratched: what the running operator has asked about its scratch.
        touch: callback that receives it when the operator has run.
        see_cast: callback that receives copies of weights in another dtype.
        workspaces: bytes by name.
        built: (address, bytes) of each block that began before the first pass, and (address, 0) where one ended.
    """

    def __init__(self, machine: Machine) -> None:
        self.events: list[tuple[Any, ...]] | None = None
        self.in_layer = self.adds_bias = False
        self.scratched: list[Scratched] = []
        self.touch: Callable[[Sequence[Scratched]], None] = _ignore
        self.see_cast: Callable[[Tensor], None] = _ignore
        self.workspaces: dict[str, int] = {}
        self.built: list[tuple[int, int]] = []
        self.observe: Callable[[str, int, int], None] = self._build
        self._device = machine.device
        machine.device.observer = self._observe
        machine.operators.watch = self._operator
        self._views = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            # the override is intended
            warnings.filterwarnings("ignore", message=".*only once for all operators", category=UserWarning)
            for view in _VIEWS:
                name = view._schema.name.removeprefix("aten::")
                self._views.impl(name, partial(self._view, view), "CUDA", allow_override=True)  # type: ignore[no-untyped-call]

    def _observe(self, action: str, address: int, size_bytes: int, _context: object) -> None:
        if not self._device.workspace:
            self.observe(action, address, size_bytes)
        elif action == "alloc":
            # it is none of the passes' blocks
            self.workspaces[self._device.workspace] = size_bytes

    def _build(self, action: str, address: int, size_bytes: int) -> None:
        if action in ("alloc", "free_completed"):
            self.built.append((address, size_bytes if action == "alloc" else 0))

    def note_node(self, func: Any) -> None:
        """Note the autograd node that runs; also where it allocates in C++ before its first operator."""
        if self.events is not None and torch._C._current_graph_task_id() != -1:
            node = torch._C._current_autograd_node()
            self.events.append(("run", None if node is None else node._sequence_nr(), str(func)))

    def _view(self, func: Any, *args: Any) -> Any:
        self.note_node(func)
        return func.redispatch(_ON_CPU, *args)

    @contextmanager
    def _operator(self, func: Any, args: Sequence[Any]) -> Iterator[None]:
        self.note_node(func)
        self.adds_bias |= self.in_layer and func in _ADDING
        yield
        if self.events is not None and func in PRODUCT_INTERNALS:
            self.events.append(("multiply",))
        if func is _COPY and isinstance(args[1], nn.Parameter) and args[0].dtype != args[1].dtype:
            self.see_cast(args[0])
        if self.scratched:
            self.touch(tuple(self.scratched))
            self.scratched.clear()


class Passes:
    """A simulated model whose passes can be recorded at any size.

    Args:
        way: what is recorded.

    Attributes:
        attention: names of the attention kernels that have run.
        built: bytes of each block that came while the model was built, and its number less than 0 where one was freed.
        buffers: bytes of each block that is left of these and no parameter's.
        paths: path of each layer's module that checkpointing runs again.
    """

    def __init__(self, trainer: Trainer, machine: Machine, watch: _Watch, way: Way) -> None:
        self.attention = machine.operators.attention_used
        self._way = way
        self._recipe, self._trainer, self._device, self._watch = trainer.recipe, trainer, machine.device, watch
        self._layers = checkpointed_layers(trainer.model)
        names = {module: name for name, module in trainer.model.named_modules()}
        self.paths = [names[layer] for layer in self._layers]
        self._numbers: dict[int, int] = {}
        self._recording, self._checkpoints = Recording(), False
        # parameters whose gradients have arrived; those of a tower that no image enters never do
        self._reached: set[str] = set()
        for index, layer in enumerate(self._layers if way is Way.UNITS else ()):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(self._run_layer, index)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrive, name))  # type: ignore[no-untyped-call]
            for name, parameter in trainer.model.named_parameters()
            if parameter.requires_grad
        ]

        watch.observe = self._observe
        self.built = tuple(_built(watch.built))
        held = dict[int, int]()
        for address, size_bytes in watch.built:
            if size_bytes:
                held[address] = size_bytes
            else:
                held.pop(address, None)
        for parameter in trainer.model.parameters():
            if (found := locate_on_cuda(parameter)) is not None:
                held.pop(found[1], None)
        self.buffers = tuple(held.values())
        watch.touch, watch.see_cast = self._touch, self._see_cast

    def _see_cast(self, copy: Tensor) -> None:
        if self._watch.events is not None and (block := self._block_of(copy)) is not None:
            self._recording.casts.add(block)

    def _touch(self, scratches: Sequence[Scratched]) -> None:
        if self._watch.events is None:
            return
        for scratch in scratches:
            self._watch.events.append(("touch", len(self._recording.scratches)))
            self._recording.scratches.append(scratch)

    def _observe(self, action: str, address: int, size_bytes: int) -> None:
        """Note an event of the allocator."""
        events = self._watch.events
        if events is None:
            return
        if action == "alloc":
            self._watch.note_node("")
            self._numbers[address] = len(self._recording.sizes)
            events.append(("take", len(self._recording.sizes)))
            self._recording.sizes.append(size_bytes)
        elif action == "free_completed" and (number := self._numbers.pop(address, None)) is not None:
            events.append(("drop", number))

    def record(self, batch: int, seq: int) -> Recording:
        """Run forward without keeping anything, then forward and backward twice: with hooks and without; or only so."""
        tokens = self.batch(batch, seq)
        if self._way is not Way.UNITS:
            return self._completed(self._forward_and_backward(tokens, nullcontext()))
        recording = self._forward_alone(tokens)
        taken = recording.sizes
        recording.unpacked = self._forward_and_backward(tokens, saved_tensors_hooks(_packed, list.pop)).backward
        plain = self._forward_and_backward(tokens, nullcontext())
        if plain.sizes[: len(taken)] != taken:
            raise UnlikePassesError("forward allocates otherwise when it runs again")
        recording.sizes, recording.scratches, recording.backward = plain.sizes, plain.scratches, plain.backward
        recording.order = plain.order
        return self._completed(recording)

    def _completed(self, recording: Recording) -> Recording:
        recording.workspaces, recording.adds_bias = dict(self._watch.workspaces), self._watch.adds_bias
        return recording

    def sizes(self, batch: int, seq: int) -> tuple[list[int], list[int]]:
        """The sizes of blocks and scratches at another size, and the order in which blocks begin and end."""
        plain = self._forward_and_backward(self.batch(batch, seq), nullcontext())
        return plain.numbers, plain.order

    def peak_bytes(self, batch: int, seq: int, *, checkpointing: bool) -> int:
        """The most bytes in blocks that forward and backward allocate, with torch's checkpointing of all layers."""
        self._checkpoints = checkpointing
        passes = self._forward_and_backward(self.batch(batch, seq), nullcontext())
        self._checkpoints = False
        rules, held_bytes, most_bytes = SizeRules(), 0, 0
        for kind, number, *_ in (event for event in (*passes.forward, *passes.backward) if len(event) > 1):
            if kind in ("take", "drop"):
                size_bytes = rules.round_request(passes.sizes[number])
                held_bytes += size_bytes if kind == "take" else -size_bytes
                most_bytes = max(most_bytes, held_bytes)
            elif kind == "touch":
                name, arguments, named = passes.scratches[number]
                scratch_bytes = rules.round_request(highest_bytes(SCRATCHES[name](*arguments, **named)))
                most_bytes = max(most_bytes, held_bytes + scratch_bytes)
        return most_bytes

    def roles(self, batch: int, seq: int) -> list[Role]:
        """The role of each block, as `explain` finds it in a snapshot of the passes; called before any other pass."""
        tokens, device = self.batch(batch, seq), self._device
        saved = SavedTensors(locate=locate_on_cuda, clock=device.now_us)
        with closing(Stamper(device.stamp, saved)) as stamper:
            stamper.open()
            stamper.attach(self._trainer.model)
            meter = PhaseMeter(device, stamper)
            for _ in range(2):
                older = device.allocations
                meter.next_step()
                self._stamped(meter, tokens)
                newer = device.allocations
                with meter.phase(Phase.OPTIMIZER):
                    pass
                self._trainer.drop_gradients()
        snapshot = with_saved_tensors(device.snapshot(), saved.rows)
        device.stop_history()
        analysis = analyze(Snapshot.from_dict(snapshot), step=2)
        return [ROLES[code] for code in analysis.role_codes[older:newer].tolist()]

    def _stamped(self, meter: PhaseMeter, tokens: dict[str, Tensor]) -> None:
        """Run the passes in their phases."""
        if self._way is Way.EVALUATION:
            # an analysis is of a step, whose only pass it is here
            with meter.phase(Phase.FORWARD):
                self._trainer.evaluate(tokens)
            return
        with meter.phase(Phase.FORWARD):
            loss = self._trainer.forward(tokens)
            meter.loss_made(loss)
        with meter.phase(Phase.BACKWARD):
            self._trainer.backward(loss)
            # transformers' Trainer returns it detached
            loss = loss.detach()

    @property
    def parameters(self) -> tuple[TapeParameter, ...]:
        """All parameters of the model on the GPU; those that no gradient reaches have no optimizer states."""
        evaluates = self._way is Way.EVALUATION
        return tuple(
            TapeParameter(
                name=name,
                shape=tuple(parameter.shape),
                width=parameter.element_size(),
                trained=parameter.requires_grad and (evaluates or name in self._reached),
            )
            for name, parameter in self._trainer.model.named_parameters()
            # transformers makes a few small ones in main memory
            if parameter.is_cuda
        )

    @property
    def max_positions(self) -> int | None:
        """Positions that the model has, with transformers' defaults."""
        config = getattr(self._trainer.model, "config", None)
        found = getattr(config, "max_position_embeddings", None)
        return found if isinstance(found, int) else None

    def batch(self, batch: int, seq: int) -> dict[str, Tensor]:
        """A batch of a size; the recipe's own has the recipe's documents."""
        recipe = self._recipe
        own = (batch, seq) == (recipe.rows, recipe.row_tokens)
        return make_batch(recipe if own else replace(recipe, batch=batch, seq=seq), GPU)

    def _forward_and_backward(self, tokens: dict[str, Tensor], hooks: AbstractContextManager[Any]) -> Recording:
        recording = self._start()
        base = _next_node()
        self._watch.events = recording.forward
        if self._way is Way.EVALUATION:
            self._trainer.evaluate(tokens)
        else:
            with hooks:
                loss = self._trainer.forward(tokens)
            self._watch.events = recording.backward
            self._trainer.backward(loss)
            loss = loss.detach()
        self._watch.events = None
        recording.backward = [
            ("run", None if event[1] is None else event[1] - base, event[2]) if event[0] == "run" else event
            for event in _first_product(recording.backward)
        ]
        recording.forward = [event for event in _first_product(recording.forward) if event[0] != "run"]
        recording.order = list(_order(recording))
        if self._trainer.offload is not None:
            recording.offloaded_bytes = self._trainer.offload.host_bytes
        self._trainer.drop_gradients()
        return recording

    def _forward_alone(self, tokens: dict[str, Tensor]) -> Recording:
        recording = self._start()
        base = _next_node()
        self._watch.events = recording.forward

        def pack(tensor: Tensor) -> None:
            recording.forward.append(("save", _next_node() - 1, self._block_of(tensor)))

        with saved_tensors_hooks(pack, _unreadable):
            loss = self._trainer.forward(tokens)
        # what remains is held by the graph alone, or for good
        ended: list[tuple[Any, ...]] = []
        self._watch.events = ended
        del loss
        self._watch.events = None
        recording.graph = [event[1] for event in ended]
        recording.forward = [
            (event[0], event[1] - base, event[2])
            if event[0] == "save"
            else (*event[:-1], event[-1] - base)
            if event[0] in ("enter", "leave")
            else event
            for event in _first_product(recording.forward)
        ]
        return recording

    def _start(self) -> Recording:
        self._numbers.clear()
        self._recording = Recording()
        return self._recording

    def _run_layer(self, index: int, run: Callable[..., Any], *args: Any) -> Any:
        """Called in place of torch.utils.checkpoint.checkpoint."""
        events = self._watch.events
        if self._checkpoints:
            return checkpoint(run, *args, use_reentrant=False)
        if events is None or self._watch.in_layer:
            return run(*args)
        self._watch.in_layer = True
        held = getattr(run, "keywords", {})
        tensors = list(_tensors((*args, *held.values())))
        blocks = [block for tensor in tensors if (block := self._block_of(tensor)) is not None]
        del tensors
        events.append(("enter", index, tuple(dict.fromkeys(blocks)), _next_node()))
        result = run(*args)
        self._watch.in_layer = False
        events.append(("leave", index, _next_node()))
        return result

    def _arrive(self, name: str, parameter: Tensor) -> None:
        self._reached.add(name)
        if self._watch.events is not None and parameter.grad is not None and parameter.grad.is_cuda:
            self._watch.events.append(("arrive", name, self._block_of(parameter.grad)))

    def _block_of(self, tensor: Tensor) -> int | None:
        found = locate_on_cuda(tensor)
        return None if found is None else self._numbers.get(found[1])


def _built(events: Sequence[tuple[int, int]]) -> Iterator[int]:
    numbers: dict[int, int] = {}
    blocks = 0
    for address, size_bytes in events:
        if size_bytes:
            numbers[address], blocks = blocks, blocks + 1
            yield size_bytes
        else:
            yield -1 - numbers.pop(address)


def _first_product(events: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """The events without all products of matrices but the first."""
    found = False
    for event in events:
        if event[0] != "multiply" or not found:
            yield event
        found |= event[0] == "multiply"


def _order(recording: Recording) -> Iterator[int]:
    """The blocks that begin and scratches, and, less than 0, the blocks that end in between, sorted."""
    ended: list[int] = []
    for event in (*recording.forward, *recording.backward):
        if event[0] == "drop":
            ended.append(-1 - event[1])
        elif event[0] in ("take", "touch"):
            yield from sorted(ended)
            ended.clear()
            yield event[1]
    yield from sorted(ended)


@contextmanager
def _asking(watch: _Watch) -> Iterator[None]:
    """Record what operators ask about their scratch, and answer that it is nothing."""

    def asked(name: str, *arguments: Any, **named: Any) -> Any:
        watch.scratched.append((name, arguments, named))
        return None if name == "embedding" else ()

    with ExitStack() as stack:
        for name, (module, function) in _ASKED.items():
            stack.enter_context(mock.patch.object(module, function, partial(asked, name)))
        yield


def _ignore(_value: Any) -> None:
    pass


def _next_node() -> int:
    """The number that autograd gives to the next node."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _packed(tensor: Tensor) -> list[Tensor]:
    return [tensor]


def _unreadable(_packed: None) -> Tensor:
    raise UnlikePassesError("forward runs backward")


@contextmanager
def passes_of(recipe: TrainingRecipe, way: Way, own: OwnModule | None) -> Iterator[Passes]:
    """Build the model of a recipe on a simulated GPU, which may be a user's own module.

    Raises:
        LigerprofError: as `simulate_step` does.
    """
    machine = machine_for(recipe, endless=True)
    # each layer's code is asked, and its events are not repeated
    machine.siblings.enabled = False
    machine.device.start_history(most_entries=None, stacks=True, counts=True)
    watch = _Watch(machine)
    built = simulated_trainer(recipe) if own is None else own_trainer(recipe, own)
    with _asking(watch), built as trainer:
        yield Passes(trainer, machine, watch, way)
