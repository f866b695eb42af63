"""One rank of several that train together: torch's fake process group, and the parts of FSDP2 that ask for a GPU."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ligerprof.errors import UnsupportedError
from ligerprof.runs.simulated.device import SimulatedDevice
from ligerprof.runs.simulated.recorder import StorageRecorder
from ligerprof.runs.simulated.streams import DeviceModule

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"


@contextmanager
def one_rank(rank: int, ranks: int) -> Iterator[None]:
    """Be one rank of a process group whose collectives send nothing; enter it outside of fake tensors.

    Raises:
        UnsupportedError: this process is part of a process group already.
    """
    if dist.is_initialized():
        raise UnsupportedError("simulate: this process is part of a process group. Simulate several GPUs in another.")
    # joining a group puts the rank in front of each line of a traceback
    with mock.patch.object(sys, "excepthook", sys.excepthook):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def sharding_on(device: SimulatedDevice, recorder: StorageRecorder) -> Iterator[None]:
    """Make FSDP2 and DTensor treat fake CPU tensors as tensors of `device`.

    | what | why |
    |---|---|
    | the module of the device, `torch.cuda` | its streams and events |
    | UntypedStorage.resize_ | FSDP2 frees and allocates gathered weights by it |
    | DTensor's computation of shapes | it runs operators on further fake tensors |
    | offloaded shards: gathering, gradients, page-locked memory | host and GPU are the same device here |
    """
    import torch.distributed.fsdp
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    streams = DeviceModule(device)
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith(_FULLY_SHARD) and hasattr(module, "_get_device_handle"):
                stack.enter_context(mock.patch.object(module, "_get_device_handle", return_value=streams))
        for owner, name, replacement in (
            (torch.UntypedStorage, "resize_", _resized(recorder)),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", _shapes_alone(recorder)),
            (FSDPParam, "all_gather_inputs", _gathered_from_host()),
            (FSDPParam, "to_sharded_dtensor", _gradients_to_host(recorder)),
            (FSDPParam, "reset_sharded_param", _padded_on_host(recorder)),
            (torch.Tensor, "is_pinned", lambda *_args: True),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def _resized(recorder: StorageRecorder) -> Callable[..., Any]:
    resize: Any = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        result = resize(storage, size_bytes)
        recorder.resize(storage, size_bytes)
        return result

    return resize_


def _shapes_alone(recorder: StorageRecorder) -> Callable[..., Any]:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_tensor_meta(*args: Any, **kwargs: Any) -> Any:
        with recorder.paused():
            return propagate(*args, **kwargs)

    return propagate_tensor_meta


def _gathered_from_host() -> property:
    """FSDPParam.all_gather_inputs: copy an offloaded shard to the GPU first."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

    gathered: Any = FSDPParam.all_gather_inputs

    def all_gather_inputs(parameter: Any) -> Any:
        if not parameter.offload_to_cpu or parameter.sharded_state is not ShardedState.SHARDED:
            return gathered.fget(parameter)
        kept = parameter._sharded_param_data
        parameter._sharded_param_data = kept.clone()
        try:
            return gathered.fget(parameter)
        finally:
            parameter._sharded_param_data = kept

    return property(all_gather_inputs)


def _gradients_to_host(recorder: StorageRecorder) -> Callable[..., Any]:
    """FSDPParam.to_sharded_dtensor: its argument is a gradient that is on the host, if the parameter is offloaded."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    wrap = FSDPParam.to_sharded_dtensor

    def to_sharded_dtensor(parameter: Any, tensor: Tensor) -> Any:
        if parameter.offload_to_cpu and hasattr(parameter, "sharded_param"):
            with recorder.on_host(locked=True):
                tensor = tensor.clone()
        return wrap(parameter, tensor)

    return to_sharded_dtensor


def _padded_on_host(recorder: StorageRecorder) -> Callable[..., Any]:
    """FSDPParam.reset_sharded_param: it pads an offloaded shard in main memory."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    reset: Any = FSDPParam.reset_sharded_param

    def reset_sharded_param(parameter: Any) -> None:
        with recorder.on_host(locked=True) if parameter.offload_to_cpu else nullcontext():
            reset(parameter)

    return reset_sharded_param
