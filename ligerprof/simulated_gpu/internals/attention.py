"""CUDA's fused attention kernels: results in allocation order, and scratch memory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ligerprof.simulated_gpu.attention import problem_of
from ligerprof.simulated_gpu.internals.call import Call, Internal
from ligerprof.torch_memory.attention import AttentionKernel, backward_scratch, flash_split_sizes, forward_scratch

aten = torch.ops.aten

# run_cudnn_SDP_fprop (aten/src/ATen/native/cudnn/MHA.cpp): seed and offset, then the output and the statistics
_CUDNN_FORWARD_ORDER = (6, 7, 0, 1)


def _cudnn_forward(call: Call) -> Any:
    result = call.run_untracked()
    # the statistics are for the backward pass alone
    for index in _CUDNN_FORWARD_ORDER if call.argument(4, "compute_log_sumexp") else _CUDNN_FORWARD_ORDER[:-1]:
        call.track(result[index])
    call.device.run_scratch(forward_scratch(AttentionKernel.CUDNN, problem_of(*call.args[:3]), call.device.gpu))
    return result


def _flash_forward(call: Call) -> Any:
    """mha_fwd: allocate seed and offset after the partial outputs; dropout copies them."""
    dropout = call.argument(3, "dropout_p", 0.0)
    problem = replace(problem_of(*call.args[:3]), dropout=dropout)
    result = call.run_untracked()
    output, statistics, random_state, unused = (result[index] for index in (0, 1, 6, 7))
    call.track((output, statistics))
    partial = [call.device.allocate(size) for size in flash_split_sizes(problem, call.device.gpu)]
    call.track((random_state, unused))
    if dropout > 0.0:
        call.device.touch(random_state.numel() * random_state.element_size())
    for block in partial:
        call.device.release(block)
    return result


def _efficient_forward(call: Call) -> Any:
    """Seed and offset stay in host memory."""
    result = call.run_untracked()
    call.track(result[:2] if call.argument(4, "compute_log_sumexp") else result[0])
    call.device.run_scratch(forward_scratch(AttentionKernel.EFFICIENT, problem_of(*call.args[:3]), call.device.gpu))
    return result


def _backward(kernel: AttentionKernel) -> Internal:
    def run(call: Call) -> Any:
        inputs: Sequence[Tensor] = call.args[1:4]
        gradient = call.args[0]
        copied = _is_copied(kernel, gradient, call.args[4])
        with call.device.held(gradient.numel() * gradient.element_size() if copied else 0):
            return call.run_with_scratch(lambda _: backward_scratch(kernel, problem_of(*inputs)))

    return run


def _is_copied(kernel: AttentionKernel, gradient: Tensor, output: Tensor) -> bool:
    """Whether the output's gradient does not have the layout that the kernel reads."""
    if kernel is AttentionKernel.CUDNN:
        return gradient.stride() != output.stride()
    return kernel is AttentionKernel.EFFICIENT and not gradient.transpose(1, 2).is_contiguous()


ATTENTION_INTERNALS: dict[Any, Internal] = {
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_forward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _backward(AttentionKernel.CUDNN),
    aten._scaled_dot_product_flash_attention.default: _flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: _backward(AttentionKernel.FLASH),
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _backward(AttentionKernel.EFFICIENT),
}
