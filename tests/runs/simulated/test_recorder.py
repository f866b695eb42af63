"""Blocks of fake tensors' storages."""

from threading import Thread

import torch

from ligerprof.runs.kernel_check.simulated import simulated_gpu


def test_what_another_thread_drops_is_freed_before_the_next_allocation() -> None:
    with simulated_gpu() as gpu:
        held = [torch.empty(1000)]
        thread = Thread(target=held.clear)
        thread.start()
        thread.join()
        # a profiler's thread must not change the allocator while the step does
        assert gpu.live_bytes == gpu.peak_bytes == 4000
        after = torch.empty(500)
        assert gpu.live_bytes == after.untyped_storage().nbytes() == 2000
        assert gpu.peak_bytes == 4000
        del after
        assert gpu.live_bytes == 0


def test_a_number_and_a_tensor_are_added_as_two_tensors_are() -> None:
    with simulated_gpu() as gpu:
        total = torch.add(0.5, torch.empty(1000), alpha=2)
        assert gpu.live_bytes == total.untyped_storage().nbytes() == 4000


def test_backward_writes_into_zeros_that_it_made() -> None:
    """For fake tensors autograd calls operators such as `index_put`, which return another tensor."""
    with simulated_gpu() as gpu:
        source, order = torch.empty(1000, requires_grad=True), torch.empty(1000, dtype=torch.int64)
        for taken in (source[order], source.index_select(0, order), source.gather(0, order), source.max(dim=0).values):
            gradient = torch.empty_like(taken)
            before_bytes, gpu.peak_bytes = gpu.live_bytes, 0
            (result,) = torch.autograd.grad(taken, source, gradient)
            assert gpu.peak_bytes - before_bytes == result.untyped_storage().nbytes() == 4000
            del result, gradient
