"""A program that uses libraries on a simulated H200; run by test_libraries.py."""

import sys
import warnings
from importlib.util import find_spec

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


if __name__ == "__main__":
    flex()
    if find_spec("bitsandbytes"):
        bitsandbytes()
    print("all checks passed", file=sys.stderr)
