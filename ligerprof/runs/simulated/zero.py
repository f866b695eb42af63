"""DeepSpeed on fake CPU tensors, as one rank of several: its own code, on an accelerator that is the simulated GPU.

| what | why |
|---|---|
| the accelerator | its streams are the simulated GPU's; no operator is compiled |
| checks for overflow | simulated gradients have no values; without an overflow, every step updates |
| checks that ranks agree | nothing is received from other ranks |
| Tensor.record_stream | delays the reuse of blocks on a GPU; fake tensors do not have it |
| DeepSpeed's process groups, functional.linear | DeepSpeed keeps them for the life of the process |
| DeepSpeed's log, standard output | `--json` prints one object there |
"""

import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any
from unittest import mock

import torch
from torch import nn

from ligerprof.recipe.deepspeed import deepspeed_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.measured.deepspeed import DeepSpeedTrainer
from ligerprof.runs.simulated.device import SimulatedDevice
from ligerprof.runs.simulated.streams import DeviceModule, Event
from ligerprof.runs.training import make_optimizer

_ACCELERATOR_VARIABLE = "DS_ACCELERATOR"


@contextmanager
def deepspeed_on(device: SimulatedDevice, rank: int, ranks: int) -> Iterator[None]:
    """Make DeepSpeed use the process group of this process and a simulated GPU; enter it outside of fake tensors."""
    from torch.nn import functional

    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        _import_for_the_cpu()
        from deepspeed import comm
        from deepspeed.accelerator import real_accelerator
        from deepspeed.runtime.zero import utils
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
        from deepspeed.utils import groups, logger

        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
        stack.enter_context(_restored(groups))
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
        stack.enter_context(mock.patch.dict(os.environ, place))
        for owner, name, replacement in (
            (real_accelerator, "ds_accelerator", _accelerator(device)),
            (comm.comm, "cdb", None),
            (functional, "linear", functional.linear),
            (torch.Tensor, "record_stream", _do_nothing),
            (utils, "assert_lst_len_same_as_other_ranks", _do_nothing),
            (utils, "get_lst_from_rank0", list),
            (DeepSpeedZeroOptimizer, "has_overflow", _without_overflow(DeepSpeedZeroOptimizer)),
            (DeepSpeedZeroOptimizer_Stage3, "has_overflow", _without_overflow(DeepSpeedZeroOptimizer_Stage3)),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        comm.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
        yield


def make_partitioned_trainer(recipe: TrainingRecipe, model: nn.Module) -> DeepSpeedTrainer:
    """A trainer of a built model under DeepSpeed's engine."""
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make_optimizer(recipe, model), config=deepspeed_config(recipe)
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


def _accelerator(device: SimulatedDevice) -> Any:
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
    methods = {name: staticmethod(call) for name, call in calls.items()}
    return type("SimulatedAccelerator", (CPU_Accelerator,), methods)()


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: answer


def _event(**_options: Any) -> Event:
    return Event()


def _without_overflow(optimizer: Any) -> Callable[..., bool]:
    """has_overflow of an optimizer, with its allocations, that finds none."""
    look = optimizer.has_overflow

    def has_overflow(*args: Any, **kwargs: Any) -> bool:
        look(*args, **kwargs)
        return False

    return has_overflow


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
