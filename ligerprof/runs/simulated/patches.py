"""All changes that a simulation makes to the process; they are undone when it ends.

| what | why |
|---|---|
| nn.Module._apply | fake parameters have weak references, for which Module.to's swap of tensors fails |
| FakeTensorMode.__deepcopy__ | copies of modules, such as peft's `modules_to_save`, belong to the same mode |
| FakeTensor.__deepcopy__ | a copy cannot take over the value that a fake tensor made of a number keeps |
| torch.utils._foreach_utils | clip_grad_norm_ asks it whether to use foreach operators, as it does on CUDA |
| transformers.masking_utils | it mistakes fake tensors for tracing, and builds masks that an eager run does not build |
| torch.amp.GradScaler | it skips a step whose gradients are not finite; simulated ones have no values |
| torch.is_autocast_enabled without a device | it means CUDA's autocast; the simulation uses the CPU's |
| torch.clear_autocast_cache | it frees casts of weights in the order of pointer hashes, which varies |
| liger-kernel's check of labels | it asks for values, which fake tensors do not have |
| torch.distributions' checks of arguments | they ask for values, which fake tensors do not have |
| triton's launches | kernels allocate no memory, and running them needs a GPU |
| composite operators, autocast's lists | they depend on the device of their inputs (composites.py, autocast.py) |
| kernels' device queries | kernels read the number of multiprocessors and the compute capability |
| constants "cuda" in other providers' kernels | they check that tensors are on a GPU |
"""

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _foreach_utils as foreach_utils

from ligerprof.gpus import GpuSpec
from ligerprof.kernels.device import simulated_device
from ligerprof.runs.simulated import autocast, composites
from ligerprof.runs.simulated.attention import attention_for
from ligerprof.runs.simulated.recorder import StorageRecorder

# fake CPU tensors in place of GPU tensors
STAND_IN = torch.device("cpu")
# packages whose kernels check for the device type "cuda"
_PROVIDERS = ("liger_kernel.ops", "cut_cross_entropy")


@contextmanager
def simulated_process(
    gpu: GpuSpec, recorder: StorageRecorder, attention_used: set[str], *, packed: bool = False
) -> Iterator[None]:
    """Make this process treat fake CPU tensors as it would treat tensors on `gpu`.

    Args:
        recorder: supplies values that fake tensors do not have.
        attention_used: receives the names of the attention kernels that ran.
        packed: whether positions restart within a row.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _apply_out_of_place))
        stack.enter_context(mock.patch.object(FakeTensorMode, "__deepcopy__", _itself, create=True))
        stack.enter_context(mock.patch.object(FakeTensor, "__deepcopy__", _copied_without_value, create=True))
        stack.enter_context(mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", _gradients_are_finite))
        stack.enter_context(mock.patch.object(torch.distributions.Distribution, "_validate_args", new=False))
        stack.enter_context(simulated_device(sm_count=gpu.sm_count))
        for context in (
            _foreach_as_on_cuda(),
            _masks_as_when_eager(recorder, packed=packed),
            _autocast_without_a_device(recorder),
            _no_launches(),
            _device_queries(gpu),
        ):
            stack.enter_context(context)
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        stack.callback(library._destroy)
        composites.register(library, attention_for(lambda: gpu, attention_used))
        autocast.register(library)
        yield


@contextmanager
def providers_take_cpu_for_cuda() -> Iterator[None]:
    """Make the loaded kernels of other providers accept CPU tensors as CUDA tensors."""
    modules = [module for name, module in sys.modules.items() if name.startswith(_PROVIDERS)]
    codes = {function: function.__code__ for module in modules for function in _functions_of(module)}
    for function, code in codes.items():
        function.__code__ = _with_constant(code, "cuda", "cpu")
    try:
        yield
    finally:
        for function, code in codes.items():
            function.__code__ = code


@contextmanager
def labels_in_range(recorder: StorageRecorder) -> Iterator[None]:
    """Let liger-kernel's cross-entropy, if it is loaded, find that labels are words of the vocabulary."""
    module = sys.modules.get("liger_kernel.ops.cross_entropy")
    if module is None:
        yield
        return
    forward = module.cross_entropy_forward

    def checked(*args: Any, **kwargs: Any) -> Any:
        with recorder.answering(truth=True):
            return forward(*args, **kwargs)

    with mock.patch.object(module, "cross_entropy_forward", checked):
        yield


def _functions_of(module: types.ModuleType) -> list[types.FunctionType]:
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    methods = [vars(value).values() for value in own if isinstance(value, type)]
    found = [*own, *(getattr(item, "__func__", item) for items in methods for item in items)]
    return [item for item in found if isinstance(item, types.FunctionType) and "cuda" in item.__code__.co_consts]


def _with_constant(code: types.CodeType, before: str, after: str) -> types.CodeType:
    return code.replace(co_consts=tuple(after if constant == before else constant for constant in code.co_consts))


def _apply_out_of_place(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    if recurse:
        for child in self.children():
            child._apply(fn)  # type: ignore[no-untyped-call]
    # parameters that several modules share, from what they were to what they are
    moved: dict[Any, nn.Parameter] = vars(fn).setdefault("moved", {})
    for name, parameter in self._parameters.items():
        if parameter is None:
            continue
        shared: Any = moved.get(parameter)
        with torch.no_grad():
            changed: Any = fn(parameter if shared is None else shared)
        if shared is not None:
            # torch swaps a DTensor each time that it meets it
            if hasattr(changed, "_local_tensor"):
                shared._local_tensor = changed._local_tensor
            self._parameters[name] = shared
        elif changed is not parameter:
            self._parameters[name] = moved[parameter] = nn.Parameter(changed, parameter.requires_grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def _itself(mode: FakeTensorMode, _memo: Any) -> FakeTensorMode:
    return mode


def _copied_without_value(tensor: FakeTensor, memo: Any) -> Any:
    value, tensor.constant = tensor.constant, None
    try:
        return Tensor.__deepcopy__(tensor, memo)  # type: ignore[no-untyped-call]
    finally:
        tensor.constant = value


def _gradients_are_finite(_scaler: Any, optimizer: Any, _state: Any, *args: Any, **kwargs: Any) -> Any:
    return optimizer.step(*args, **kwargs)


def _foreach_devices() -> list[str]:
    return ["cpu", "cuda"]


def _is_never_tracing(_tensor: Any = None) -> bool:
    # not a Mock, which would keep the tensor that it is called with
    return False


@contextmanager
def _foreach_as_on_cuda() -> Iterator[None]:
    types_too = [*foreach_utils._foreach_supported_types, FakeTensor]
    with (
        mock.patch.object(foreach_utils, "_get_foreach_kernels_supported_devices", _foreach_devices),
        mock.patch.object(foreach_utils, "_foreach_supported_types", types_too),
    ):
        yield


@contextmanager
def _masks_as_when_eager(recorder: StorageRecorder, *, packed: bool) -> Iterator[None]:
    import transformers.masking_utils as masking

    find_packed = masking.find_packed_sequence_indices

    def find_documents(position_ids: Tensor) -> Any:
        # its allocations count, and it reads whether all positions are consecutive
        with recorder.answering(truth=not packed):
            return find_packed(position_ids)

    with (
        mock.patch.object(masking, "is_tracing", _is_never_tracing),
        mock.patch.object(masking, "find_packed_sequence_indices", find_documents),
    ):
        yield


@contextmanager
def _autocast_without_a_device(recorder: StorageRecorder) -> Iterator[None]:
    enabled, clear_cache = torch.is_autocast_enabled, torch.clear_autocast_cache

    def enabled_on_stand_in(device_type: str = "cpu") -> bool:
        return enabled(device_type)

    def clear_cache_in_order() -> None:
        with recorder.releasing_by_address():
            clear_cache()

    with (
        mock.patch.object(torch, "is_autocast_enabled", enabled_on_stand_in),
        mock.patch.object(torch, "clear_autocast_cache", clear_cache_in_order),
    ):
        yield


@contextmanager
def _no_launches() -> Iterator[None]:
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.jit import KernelInterface

    def launcher(_kernel: Any, _grid: Any) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None

    with mock.patch.object(KernelInterface, "__getitem__", launcher):
        yield


@contextmanager
def _device_queries(gpu: GpuSpec) -> Iterator[None]:
    properties = types.SimpleNamespace(
        name=gpu.title,
        major=gpu.compute_capability[0],
        minor=gpu.compute_capability[1],
        multi_processor_count=gpu.sm_count,
        max_threads_per_multi_processor=gpu.max_threads_per_sm,
        total_memory=gpu.memory_bytes,
    )
    with (
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=gpu.compute_capability),
    ):
        yield
