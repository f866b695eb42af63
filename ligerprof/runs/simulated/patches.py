"""Everything that a simulation changes in the process, in one place; all of it is undone at the end."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ligerprof.gpus import GpuSpec
from ligerprof.kernels.device import standing_for
from ligerprof.runs.simulated import composites
from ligerprof.runs.simulated.attention import attention_for
from ligerprof.runs.simulated.recorder import StorageRecorder


def _apply_out_of_place(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    if recurse:
        for child in self.children():
            _apply_out_of_place(child, fn)
    for name, parameter in self._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            changed = fn(parameter)
        if changed is not parameter:
            self._parameters[name] = nn.Parameter(changed, parameter.requires_grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def _foreach_devices() -> list[str]:
    return ["cpu", "cuda"]


def _is_never_tracing(_tensor: Any = None) -> bool:
    return False


def _launches_nothing(_kernel: Any, _grid: Any) -> Callable[..., None]:
    def launch(*_args: Any, **_kwargs: Any) -> None:
        pass

    return launch


def _gradients_are_finite(_scaler: Any, optimizer: Any, _state: Any, *args: Any, **kwargs: Any) -> Any:
    return optimizer.step(*args, **kwargs)


@contextmanager
def simulated_process(gpu: GpuSpec, recorder: StorageRecorder) -> Iterator[None]:
    """Make this process treat fake CPU tensors as it would treat tensors on `gpu`."""
    import transformers.masking_utils as masking

    with ExitStack() as stack:
        # fake parameters have weak references, for which Module.to's swap of tensors fails
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _apply_out_of_place))
        # clip_grad_norm_ and optimizers take the foreach road on CUDA
        stack.enter_context(
            mock.patch("torch.utils._foreach_utils._get_foreach_kernels_supported_devices", _foreach_devices)
        )
        # fake tensors count as tracing, for which a mask is built that no eager run builds
        stack.enter_context(mock.patch.object(masking, "is_tracing", _is_never_tracing))
        # positions run through: what it computes is allocated, and the answer is that nothing is packed
        find_packed = masking.find_packed_sequence_indices

        def nothing_is_packed(position_ids: Tensor) -> Tensor | None:
            with recorder.answering(truth=True):
                return find_packed(position_ids)

        stack.enter_context(mock.patch.object(masking, "find_packed_sequence_indices", nothing_is_packed))
        # a scaler that finds infinities skips the step: simulated gradients have none
        stack.enter_context(mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", _gradients_are_finite))
        # Triton kernels allocate nothing: a step holds the same memory without their launches
        stack.enter_context(mock.patch("triton.runtime.jit.KernelInterface.__getitem__", _launches_nothing))
        stack.enter_context(standing_for(sm_count=gpu.sm_count))
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        stack.callback(library._destroy)
        composites.register(library, attention_for(gpu))
        yield
