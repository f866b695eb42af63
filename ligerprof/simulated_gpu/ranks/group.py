"""Process groups of simulated ranks: collectives take the memory that they take with NCCL, and exchange what is known.

The ranks that are asked for exchange the numbers that they know (counts of tokens, lengths to pad to, objects). A rank
that does not run has what the next one below it has that does, and the report says so. What one rank alone sends
(broadcasts, scatters, sends) comes from that rank, which is started if it does not run. Numbers that a model computes
are not sent.
"""

import functools
import inspect
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ligerprof.runs.recording.imports import after_import_or_now
from ligerprof.runs.recording.saved import storage_address
from ligerprof.simulated_gpu.cuda_api import replace_everywhere
from ligerprof.simulated_gpu.plans import functions
from ligerprof.simulated_gpu.ranks.launchers import replace_launchers
from ligerprof.simulated_gpu.ranks.messages import Messages, Parts, WorldStore, is_message
from ligerprof.simulated_gpu.ranks.world import World

# machine.Machine, which imports this module
Machine = Any
NAME = "simulated"
_ALL = "all"
# kWatchdogThreadSleepMillis
_WATCHDOG_SECONDS = 0.1
c10d: Any = dist.distributed_c10d
_bindings: Any = torch._C._distributed_c10d
# torch describes their methods with overloads of other names
_distributed: Any = dist
_ProcessGroup: Any = _distributed.ProcessGroup


class _NoNccl:
    """What no group here is an instance of."""

    class Options(SimpleNamespace):
        """Options of a group, which change no memory."""

        def __init__(self, **options: Any) -> None:
            super().__init__(config=SimpleNamespace(), **options)


class SimulatedGroup(_ProcessGroup):  # type: ignore[misc]
    """A group of ranks of which this process is one.

    Args:
        rank: this process's, in the group; `members` are ranks of the whole world.
        name: the same in all of them.

    Attributes:
        keeps_reduced: whether what is reduced stays until the next reduction, as DDP's buckets do on a GPU where that
            comes before NCCL's watchdog; where a program sleeps meanwhile, the watchdog is first.
    """

    asked = "cpu:gloo,cuda:nccl"
    supports_splitting = False
    keeps_reduced = False
    _of_barrier: Tensor | None = None
    _reduced_last: Sequence[Tensor] = ()

    def __init__(self, rank: int, members: Sequence[int], name: str, machine: Machine, messages: Messages) -> None:
        super().__init__(rank, len(members))
        self._rank, self._members, self._key = rank, list(members), name
        self._machine, self._messages = machine, messages

    def size(self) -> int:
        return len(self._members)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        """Where it takes tensors; objects go through the CPU if it does there."""
        if ":" in self.asked:
            return [torch.device(part.partition(":")[0]) for part in self.asked.split(",")]
        return [torch.device(name) for name in (("cuda",) if self.asked == "nccl" else ("cpu", "cuda"))]

    @property
    def pg_name(self) -> str:
        return str(c10d._world.pg_names[self])

    @property
    def group_name(self) -> str:
        return self.pg_name

    def let_go(self) -> None:
        """Free what was reduced last, as NCCL's watchdog does when it has looked."""
        self._reduced_last = ()

    # collectives that give all ranks the same

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce the values that are known."""
        if self.keeps_reduced:
            self._reduced_last = list(tensors)
        for tensor in tensors:
            self._reduce("all_reduce", tensor, [tensor], opts)
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        is_root = opts is None or opts.rootRank == self._rank
        for tensor in tensors:
            self._reduce("reduce", tensor, [tensor], opts, waits=is_root)
        return _done(tensors)

    def barrier(self, opts: Any = None) -> Any:
        """ProcessGroup::barrier chooses its backend by a tensor of one byte; ProcessGroupNCCL reduces one number."""
        device = getattr(opts, "device", None)
        on_gpu = "nccl" in self.asked and (device is None or device.type == "cuda")
        of_call = functions.empty(1, dtype=torch.uint8, device="cuda") if on_gpu else None
        if on_gpu:
            functions.empty(1, device="cuda")
        if _keeps_tensor_of_barrier():
            SimulatedGroup._of_barrier = of_call
        # files that one rank wrote before are there for the others
        self._messages.exchange(self._key, self._members, [])
        return _done([])

    def monitored_barrier(self, _timeout: Any = None, *, wait_all_ranks: bool = False) -> None:
        """A barrier of gloo's, in main memory."""
        self._messages.exchange(self._key, self._members, [])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """ProcessGroupNCCL gathers into one flat tensor first if the sizes are the same."""
        for parts, tensor in zip(outputs, inputs, strict=True):
            flat = self._flat(parts)
            self._gathered(parts, tensor)
            del flat
        return _done(outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [tensor])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._gathered(self._parts(output), tensor)
        return _done(outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for index, tensor in enumerate(inputs):
            self._gathered(outputs[index] if outputs else [], tensor)
        return _done(outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """ProcessGroupNCCL copies the parts into one flat tensor first if the sizes are the same."""
        for output, parts in zip(outputs, inputs, strict=True):
            flat = self._flat(parts)
            self._scattered(output, parts, opts)
            del flat
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._scattered(output, self._parts(tensor), opts)
        return _done(outputs)

    @torch.no_grad()
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Exchange parts; the sizes of floats, which differ from rank to rank, are known from integers before."""
        found: list[Parts] = [[None] * self.size()] * self.size()
        if not inputs[0].dtype.is_floating_point and all(is_message(part) for part in inputs):
            found = self._everyones("all_to_all", inputs)
        for output, parts in zip(outputs, found, strict=True):
            self._write(output, parts[self._rank], inputs[self._rank])
        return _done(outputs)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: Any = None, input_sizes: Any = None, opts: Any = None
    ) -> Any:
        return self.alltoall(self._split(output, output_sizes), self._split(tensor, input_sizes), opts)

    # what one rank sends

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        root = getattr(opts, "rootRank", 0)
        for tensor in tensors:
            self._sent(tensor, root, _ALL)
        return _done(tensors)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        root = getattr(opts, "rootRank", 0)
        for index, output in enumerate(outputs):
            if root == self._rank:
                for rank, part in enumerate(inputs[index]):
                    if rank == self._rank:
                        output.copy_(part)
                    elif is_message(part):
                        self._post(part, str(rank))
            else:
                self._sent(output, root, str(self._rank))
        return _done(outputs)

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> Any:
        """Send to one rank; ProcessGroupNCCL marks what it sends and receives as used by its stream, and keeps none."""
        self._messages.meets(self._members[target])
        for tensor in tensors:
            if is_message(tensor):
                self._post(tensor, f"{target}/p2p")
        return _done([])

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        self._messages.meets(self._members[source])
        for tensor in tensors:
            self._sent(tensor, source, f"{self._rank}/p2p")
        return _done([])

    # what torch asks a group that is made of backends

    def _start_coalescing(self, _device: Any) -> None:
        """Nothing."""

    def _end_coalescing(self, _device: Any) -> Any:
        return _done([])

    def _get_backend(self, _device: Any) -> Any:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Nothing."""

    # names of torch before 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _flat(self, parts: Sequence[Tensor]) -> Tensor | None:
        if not parts or not parts[0].is_cuda or any(part.shape != parts[0].shape for part in parts):
            return None
        return functions.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype, device=parts[0].device)

    def _split(self, tensor: Tensor, sizes: Any) -> list[Tensor]:
        rows = [] if sizes is None else [int(size) for size in sizes]
        return list(functions.split(tensor, rows) if rows else tensor.chunk(self.size()))

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.view(-1).chunk(self.size())) if tensor.is_contiguous() else [tensor] * self.size()

    def _gathered(self, parts: Sequence[Tensor], tensor: Tensor) -> None:
        """Fill the parts with what each rank has; a rank that does not gather has none."""
        found: Sequence[Parts] = [[None]] * len(parts)
        if is_message(max(parts, key=lambda part: part.numel(), default=tensor)):
            found = self._everyones("all_gather", [tensor], waits=bool(parts))
        for part, given in zip(parts, found, strict=False):
            self._write(part, given[0], tensor)

    def _scattered(self, output: Tensor, parts: list[Tensor], opts: Any) -> None:
        """Reduce the parts, and keep this rank's."""
        self._write(output, None, parts[self._rank])
        self._reduce("reduce_scatter", output, parts, opts)

    def _reduce(self, what: str, output: Tensor, tensors: list[Tensor], opts: Any, *, waits: bool = True) -> None:
        """Reduce what each rank gives for this one, if it is known."""
        if self.size() == 1 or not all(is_message(tensor) for tensor in tensors):
            return
        found = self._everyones(what, tensors, waits=waits)
        values = [parts[self._rank if len(parts) > 1 else 0] for parts in found]
        known = [value for value in values if value is not None]
        if len(known) == self.size():
            result = _reduced(known, getattr(opts, "reduceOp", dist.ReduceOp.SUM))
            self._write(output, result.to(output.dtype), output)
        elif known:
            self._forget(output)

    def _everyones(self, what: str, tensors: list[Tensor], *, waits: bool = True) -> list[Parts]:
        """What each member has of these; None: not known."""
        parts = [self._machine.values.copy_of(part) if part.is_cuda else part.detach() for part in tensors]
        if not self._messages.run_together(self._members) and any(part is not None for part in parts):
            kind = str(tensors[0].dtype).removeprefix("torch.")
            self._machine.values.note(f"{what} of {kind}, as if ranks that do not run had what one has that does")
        return self._messages.exchange(self._key, self._members, parts, waits=waits)

    @torch.no_grad()
    def _write(self, target: Tensor, value: Tensor | None, own: Tensor) -> None:
        """Let a tensor have values of another rank; if they are not known, it is like this rank's own tensor."""
        if value is not None and value.numel() == target.numel():
            if target.is_cuda and self._machine.values.known(target) is None:
                # a part of a tensor, whose others follow
                self._machine.values.set(target, value.reshape(target.shape))
            target.copy_(value.reshape(target.shape))
        elif own.numel() != target.numel():
            self._forget(target)
        elif own.data_ptr() != target.data_ptr():
            target.copy_(own.detach().reshape(target.shape))

    def _forget(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            self._machine.values.forget(storage_address(tensor))

    def _sent(self, tensor: Tensor, source: int, to: str) -> None:
        """Have the values that one rank of the group sends, or send them."""
        if self.size() == 1 or not is_message(tensor):
            return
        if source == self._rank:
            self._post(tensor, to)
            return
        sender = self._members[source]
        if tensor.is_cuda and tensor.is_floating_point() and not self._messages.run_together([sender]):
            # nobody is started for what a model computes
            self._messages.skip(self._key, sender, to)
            return
        values = self._messages.receive(self._key, sender, to)
        if values is None:
            return
        with torch.no_grad():
            tensor.copy_(values.view(tensor.dtype).reshape(tensor.shape))

    def _post(self, tensor: Tensor, to: str) -> None:
        self._messages.send(self._key, to, self._machine.values.copy_of(tensor) if tensor.is_cuda else tensor)


def _reduced(values: list[Tensor], reduction: Any) -> Tensor:
    """What a reduction gives of the values of all ranks."""
    kinds = dist.ReduceOp
    pairs = {kinds.BAND: "bitwise_and", kinds.BOR: "bitwise_or", kinds.BXOR: "bitwise_xor"}
    pairs |= {kinds.MIN: "minimum", kinds.MAX: "maximum", kinds.PRODUCT: "mul"}
    name = next((name for kind, name in pairs.items() if reduction == kind), "add")
    result = functools.reduce(getattr(functions, name), values)
    return result / len(values) if reduction == kinds.AVG else result


@functools.cache
def _keeps_tensor_of_barrier() -> bool:
    """Whether this torch's tensor stays until the next barrier, in C++'s static memory."""
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroup.hpp"
    return "static at::Tensor tensor" in header.read_text()


def _done(value: Any) -> Any:
    """The work of a collective that has ended."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return _bindings._create_work_from_future(future)


def install_ranks(machine: Machine) -> None:
    """Make this process a rank of the world that its environment names, and launchers start such ranks."""
    rank, size = (int(os.environ.get(name) or default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    world = World.from_environment()
    messages = Messages(world, rank, size)
    replace_launchers()
    after_import_or_now(
        "torch.distributed.distributed_c10d", lambda _: _install_groups(machine, messages, world.folder, rank, size)
    )


def _install_groups(machine: Machine, messages: Messages, folder: Path | None, rank: int, size: int) -> None:
    """Let torch.distributed make these groups, whatever backend a program asks for.

    Args:
        folder: of the world; None if this process is alone in it.
    """
    counted: dict[tuple[int, ...], int] = {}
    # C++ calls its methods, and does not keep it
    store = _bindings.HashStore() if folder is None else WorldStore(folder, messages)

    def create(options: Any, _backend_options: Any = None) -> SimulatedGroup:
        members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        counted[members] = counted.get(members, 0) + 1
        name = f"{members}/{counted[members]}"
        return SimulatedGroup(options.group_rank, members, name, machine, messages)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    init, new_group = c10d.init_process_group, c10d.new_group

    def init_process_group(*arguments: Any, **named: Any) -> None:
        given = inspect.signature(init).bind(*arguments, **named).arguments
        own_size, own_rank = given.get("world_size", -1), given.get("rank", -1)
        if multiprocessing.parent_process() and own_size == size and own_rank not in (None, -1, rank):
            # each rank of the command starts functions for all of them, of which it is one
            raise SystemExit
        init(
            NAME,
            store=store,
            world_size=size if own_size in (-1, None) else own_size,
            rank=rank if own_rank in (-1, None) else own_rank,
            timeout=given.get("timeout"),
            group_name=given.get("group_name", ""),
        )
        _asked_for(dist.group.WORLD, given.get("backend"))
        if isinstance(given.get("device_id"), torch.device):
            c10d._get_default_group().bound_device_id = given["device_id"]

    def new(ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **named: Any) -> Any:
        group = new_group(ranks, timeout, None, None, **named)
        _asked_for(group, backend or getattr(dist.group.WORLD, "asked", None))
        return group

    def split(parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, *_others: Any, **_named: Any) -> Any:
        parent: Any = parent_pg or dist.group.WORLD
        groups = {tuple(ranks): new([parent._members[rank] for rank in ranks], timeout) for ranks in split_ranks}
        return next((group for ranks, group in groups.items() if parent.rank() in ranks), None)

    def backend_of(group: Any = None) -> str:
        asked: str = getattr(group or dist.group.WORLD, "asked", "nccl")
        return "nccl" if "nccl" in asked else asked

    replace_everywhere(c10d.get_backend, backend_of)
    replace_everywhere(c10d.init_process_group, init_process_group)
    replace_everywhere(c10d.new_group, new)
    replace_everywhere(c10d.split_group, split)
    after_import_or_now("torch.nn.parallel.distributed", _keep_buckets)
    _objects_grow(machine)
    for name in ("is_nccl_available", "is_gloo_available", "is_torchelastic_launched"):
        replace_everywhere(getattr(c10d, name), lambda: True)
    if not hasattr(c10d, "ProcessGroupNCCL"):
        # torch without CUDA, whose functions ask whether a group is one, and programs for its options
        c10d.ProcessGroupNCCL = _distributed.ProcessGroupNCCL = _NoNccl


def _keep_buckets(module: Any) -> None:
    make_reducer, sleep = module.DistributedDataParallel._ddp_init_helper, time.sleep
    keeping: set[SimulatedGroup] = set()

    def keep_and_make(self: Any, *arguments: Any, **named: Any) -> None:
        self.process_group.keeps_reduced = True
        keeping.add(self.process_group)
        make_reducer(self, *arguments, **named)

    def rest(seconds: Any) -> None:
        sleep(seconds)
        if seconds >= _WATCHDOG_SECONDS and threading.current_thread() is threading.main_thread():
            for group in keeping:
                group.let_go()

    module.DistributedDataParallel._ddp_init_helper = keep_and_make
    time.sleep = rest


def _objects_grow(machine: Machine) -> None:
    """Let the bytes of a pickled object stay where torch makes its buffer as large as the largest object's."""
    resize: Callable[..., Tensor] = Tensor.resize_

    def resize_(tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
        is_object = tensor.is_cuda and tensor.dtype == torch.uint8 and tensor.dim() == 1
        before = machine.values.copy_of(tensor) if is_object else None
        resized = resize(tensor, *arguments, **named)
        if before is not None and tensor.numel() > before.numel():
            values = functions.zeros(tensor.shape, dtype=torch.uint8)
            values[: before.numel()] = before
            machine.values.set(tensor, values)
        return resized

    Tensor.resize_ = resize_  # type: ignore[method-assign, assignment]


def _asked_for(group: Any, backend: Any) -> None:
    if backend is not None and isinstance(group, SimulatedGroup):
        group.asked = str(backend)
