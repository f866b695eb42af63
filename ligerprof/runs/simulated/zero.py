"""DeepSpeed on fake CPU tensors, as one rank of several: its own code, on an accelerator that is the simulated GPU.

| what | why |
|---|---|
| the accelerator | its streams are the simulated GPU's; no operator is compiled |
| checks for overflow | simulated gradients have no values; without an overflow, every step updates |
| asynchronous all-gathers | NCCL keeps their inputs until the code waits (TensorShelf in ProcessGroupNCCL.cpp) |
| checks that ranks agree | nothing is received from other ranks |
| Tensor.record_stream | delays the reuse of blocks on a GPU; fake tensors do not have it |
| DeepSpeed's process groups, functional.linear | DeepSpeed keeps them for the life of the process |
| DeepSpeedCPUAdam's compiled operator | it updates tensors in place |
| devices, page-locked copies | GPU and main memory are the same device here (`places.py`) |
| DeepSpeed's log, standard output | `--json` prints one object there |
"""

import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from ligerprof.recipe.categories import Offload
from ligerprof.recipe.deepspeed import deepspeed_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.measured.deepspeed import DeepSpeedTrainer, partitioned_optimizer
from ligerprof.runs.simulated.device import SimulatedDevice
from ligerprof.runs.simulated.places import SIMULATED_GPU, two_places
from ligerprof.runs.simulated.recorder import StorageRecorder
from ligerprof.runs.simulated.streams import DeviceModule, Event
from ligerprof.torch_memory.pinned import pinned_bytes

_ACCELERATOR_VARIABLE = "DS_ACCELERATOR"


@contextmanager
def deepspeed_on(
    device: SimulatedDevice, recorder: StorageRecorder, recipe: TrainingRecipe, rank: int
) -> Iterator[None]:
    """Make DeepSpeed use the process group of this process and a simulated GPU; enter it outside of fake tensors."""
    from torch.nn import functional

    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        _import_for_the_cpu()
        from deepspeed import comm
        from deepspeed.accelerator import real_accelerator
        from deepspeed.comm.torch import TorchBackend
        from deepspeed.ops.adam import cpu_adam
        from deepspeed.runtime.utils import CheckOverflow
        from deepspeed.runtime.zero import utils
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
        from deepspeed.utils import groups, logger

        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
        stack.enter_context(_restored(groups))
        place = {"RANK": str(rank), "WORLD_SIZE": str(recipe.gpus), "LOCAL_RANK": "0"}
        stack.enter_context(mock.patch.dict(os.environ, place))
        accelerator = _accelerator(device, _offloading(recorder) if recipe.offload is not Offload.NONE else {})
        checking = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, CheckOverflow)
        for owner, name, replacement in (
            (real_accelerator, "ds_accelerator", accelerator),
            (cpu_adam, "CPUAdamBuilder", _UncompiledAdam),
            (comm.comm, "cdb", None),
            (functional, "linear", functional.linear),
            (TorchBackend, "all_gather_into_tensor", _keeping_input(TorchBackend.all_gather_into_tensor)),
            (torch.Tensor, "record_stream", _do_nothing),
            (utils, "assert_lst_len_same_as_other_ranks", _do_nothing),
            (utils, "get_lst_from_rank0", list),
            *((owner, "has_overflow", _finding_nothing(owner.has_overflow)) for owner in checking),
            # without ZeRO, each gradient is checked until one overflows
            (CheckOverflow, "_has_inf_or_nan", staticmethod(_finding_nothing(CheckOverflow._has_inf_or_nan))),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        comm.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
        yield


@contextmanager
def offloading(recipe: TrainingRecipe, recorder: StorageRecorder) -> Iterator[None]:
    """Tell GPU and main memory apart, if the recipe offloads; enter it around fake tensors' code."""
    if recipe.offload is Offload.NONE:
        yield
        return
    with two_places(recorder):
        yield


def make_partitioned_trainer(recipe: TrainingRecipe, model: nn.Module) -> DeepSpeedTrainer:
    """A trainer of a built model under DeepSpeed's engine."""
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model, optimizer=partitioned_optimizer(recipe, model), config=deepspeed_config(recipe)
    )
    return DeepSpeedTrainer(recipe=recipe, engine=engine)


def _import_for_the_cpu() -> None:
    """Import DeepSpeed without a search for GPUs, which would start CUDA where there is one."""
    if "deepspeed" in sys.modules:
        return
    with mock.patch.dict(os.environ, {_ACCELERATOR_VARIABLE: "cpu"}):
        import deepspeed  # noqa: F401
    from deepspeed.accelerator import real_accelerator

    real_accelerator.ds_accelerator = None


def _accelerator(device: SimulatedDevice, more: Mapping[str, Callable[..., Any]]) -> Any:
    """DeepSpeed's accelerator for CPU tensors that behaves as its accelerator for CUDA."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    streams = DeviceModule(device)

    calls: dict[str, Callable[..., Any]] = {
        "Stream": streams.Stream,
        "Event": _event,
        "stream": streams.stream,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "empty_cache": device.allocator.empty_cache,
    }
    answers = {
        "is_synchronized_device": False,
        "is_bf16_supported": True,
        "is_fp16_supported": True,
        "communication_backend_name": "fake",
        "create_op_builder": None,
    }
    calls |= {name: _always(answer) for name, answer in answers.items()}
    methods = {name: staticmethod(call) for name, call in {**calls, **more}.items()}
    return type("SimulatedAccelerator", (CPU_Accelerator,), methods)()


class _UncompiledAdam:
    """DeepSpeed's builder of DeepSpeedCPUAdam's operator, which returns one that does nothing."""

    def load(self) -> Any:
        """The operator's module."""
        return SimpleNamespace(**dict.fromkeys(("create_adam", "adam_update", "destroy_adam"), _do_nothing))


def _offloading(recorder: StorageRecorder) -> dict[str, Callable[..., Any]]:
    """Methods of the accelerator that distinguish the GPU from main memory."""

    def pin_memory(tensor: torch.Tensor, *_arguments: Any, **_options: Any) -> torch.Tensor:
        with recorder.on_host():
            # a view of the whole block
            block = tensor.new_empty(pinned_bytes(tensor.nbytes) // tensor.element_size())
        return block[: tensor.numel()].view(tensor.shape)

    def on_accelerator(tensor: torch.Tensor) -> bool:
        return not recorder.is_on_host(tensor)

    name = _always(str(SIMULATED_GPU))
    named = {"device_name": name, "current_device_name": name, "is_pinned": _always(answer=True)}
    return {**named, "pin_memory": pin_memory, "on_accelerator": on_accelerator}


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: answer


def _event(**_options: Any) -> Event:
    return Event()


def _finding_nothing(look: Callable[..., Any]) -> Callable[..., bool]:
    """A check for overflow, with its allocations, that finds none."""

    def check(*args: Any, **kwargs: Any) -> bool:
        look(*args, **kwargs)
        return False

    return check


class _Gathering:
    """An all-gather that has not been waited for, with its input."""

    def __init__(self, work: Any, source: torch.Tensor) -> None:
        self._work, self._source = work, source

    def wait(self, *arguments: Any, **options: Any) -> Any:
        """Wait, and let go of the input."""
        del self._source
        return self._work.wait(*arguments, **options)


def _keeping_input(gather: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(self: Any, output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        work = gather(self, output_tensor, input_tensor, group=group, async_op=async_op)
        return _Gathering(work, input_tensor) if async_op else work

    return all_gather


def _do_nothing(*_arguments: Any) -> None:
    pass


@contextmanager
def _restored(module: Any) -> Iterator[None]:
    """Undo assignments to a module's names at the end."""
    before = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
    try:
        yield
    finally:
        vars(module).update(before)
