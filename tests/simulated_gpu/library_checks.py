"""A program that uses libraries on a simulated H200; run by test_libraries.py."""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ligerprof.torch_memory.allocator.settings import SizeRules
from ligerprof.torch_memory.low_bit import int8_sizes, nf4_sizes

ROUNDED = SizeRules().round_request


def allocated() -> int:
    return int(torch.cuda.memory_allocated())


def flex() -> None:
    warnings.simplefilter("ignore")
    query, key, value = (torch.randn(2, 4, 256, 64, device="cuda", requires_grad=True) for _ in range(3))
    mask = create_block_mask(lambda _b, _h, q, k: q >= k, None, None, 256, 256, device="cuda")
    flex_attention(query, key, value, block_mask=mask).sum().backward()
    assert query.grad is not None
    assert query.grad.shape == query.shape
    # without a fused kernel, all scores are there
    assert torch.cuda.max_memory_allocated() > 2 * 4 * 256 * 256 * 4


def highest_of(work: Callable[[], object]) -> int:
    """What the work adds at most to what is allocated."""
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return int(torch.cuda.max_memory_allocated()) - before


def flash_attn() -> None:
    """Sizes of csrc/flash_attn/flash_api.cpp: heads of 64, four of queries for each of keys, 300 tokens in 3 x 128."""
    import flash_attn as package

    assert version("flash-attn") == package.__version__
    made = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    for shape, rows, sequences in (((2, 300), 2 * 384, 0), ((600,), 600 + 5 * 128, 5)):
        query = torch.randn(*shape, 8, 64, **made)
        key, value = (torch.randn(*shape, 2, 64, **made) for _ in range(2))
        starts = torch.zeros(sequences + 1, dtype=torch.int32, device="cuda")
        before = allocated()
        if sequences:
            output = package.flash_attn_varlen_func(query, key, value, starts, starts, 300, 300, causal=True)
        else:
            output = package.flash_attn_func(query, key, value, causal=True)
        # the output, fp32 sums for each token and head, and the state of random numbers
        each = 600 * 64 * 2
        assert allocated() - before == ROUNDED(8 * each) + ROUNDED(600 * 8 * 4) + ROUNDED(16)
        gradient = torch.empty_like(output)
        results = ROUNDED(8 * each) + 2 * ROUNDED(2 * each)
        inside = ROUNDED(rows * 8 * 4) + ROUNDED(rows * 8 * 64 * 4) + 2 * ROUNDED(8 * each)
        assert highest_of(partial(output.backward, gradient)) == results + inside
        assert key.grad is not None
        assert key.grad.shape == key.shape
        del output, gradient
    mask = torch.ones(2, 300, dtype=torch.int32)
    mask[1, 200:] = 0
    states, indices, starts, longest, _ = bert_padding().unpad_input(torch.randn(2, 300, 8, device="cuda"), mask.cuda())
    assert (states.shape, starts.shape, longest) == ((500, 8), (3,), 300)
    assert bert_padding().pad_input(states, indices, 2, 300).shape == (2, 300, 8)


def bert_padding() -> Any:
    return import_module("flash_attn.bert_padding")


def bitsandbytes() -> None:
    import bitsandbytes as bnb

    # the first layer makes a table that all share
    layers = []
    for _ in range(2):
        before = allocated()
        layers.append(bnb.nn.Linear4bit(1024, 512, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").cuda())
    assert allocated() - before == sum(map(ROUNDED, nf4_sizes(1024 * 512, nested=True)))
    value = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layers[1](value).sum().backward()
    assert value.grad is not None

    before = allocated()
    eight = bnb.nn.Linear8bitLt(1024, 512, bias=False, has_fp16_weights=False, threshold=6.0).cuda()
    assert allocated() - before == sum(map(ROUNDED, int8_sizes(512, 1024)))
    assert eight(value.detach().half()).shape == (2048, 512)

    weight = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    weight.grad = torch.zeros_like(weight)
    before = allocated()
    bnb.optim.PagedAdamW([weight]).step()
    assert allocated() == before
    optimizer = bnb.optim.AdamW8bit([weight])
    optimizer.step()
    assert allocated() - before == 2 * (1 << 20) + 2 * 4 * (1 << 12) + 2 * 1024
    assert optimizer.state[weight]["state1"].dtype == torch.uint8


def triton_autotune() -> None:
    """A new key takes a buffer of 256 MiB and copies of what is restored, as measured on an H200."""
    triton = import_module("triton")
    configs = [triton.Config({"BLOCK": size}) for size in (256, 1024)]

    @triton.autotune(configs=configs, key=["n"], restore_value=["y"])  # type: ignore[untyped-decorator]
    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(x, y, n, BLOCK):  # type: ignore[no-untyped-def]
        pass

    values = [torch.empty(1 << 20, device="cuda") for _ in range(2)]
    for expected in (1 << 28) + (1 << 22), 0:
        torch.cuda.reset_peak_memory_stats()
        before = allocated()
        kernel[(1,)](*values, 1 << 20)
        assert torch.cuda.max_memory_allocated() - before == expected
    assert kernel.best_config is configs[0]


def float8_product() -> None:
    """It takes the workspaces of cuBLAS and cuBLASLt."""
    torch._C._cuda_clearCublasWorkspaces()
    left, right = (torch.empty(64, 64, device="cuda", dtype=torch.float8_e4m3fn) for _ in range(2))
    scale, before = torch.ones((), device="cuda"), allocated()
    result = torch._scaled_mm(left, right.t(), scale, scale, out_dtype=torch.bfloat16)
    assert allocated() - before - ROUNDED(result.nbytes) == (32 << 20) + (1 << 20)


if __name__ == "__main__":
    flex()
    triton_autotune()
    float8_product()
    flash_attn()
    if find_spec("bitsandbytes"):
        bitsandbytes()
    print("all checks passed", file=sys.stderr)
