import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ligerprof.gpus import find_gpu
from ligerprof.runs.simulated.attention import Problem, choose_kernel


def problem(
    dtype: torch.dtype,
    *,
    head_dim: int = 64,
    kv_heads: int = 8,
    mask: bool = False,
    causal: bool = True,
    dropout: float = 0.0,
) -> Problem:
    with FakeTensorMode():
        query = torch.empty(2, 128, 8, head_dim, dtype=dtype, requires_grad=True).transpose(1, 2)
        key = torch.empty(2, 128, kv_heads, head_dim, dtype=dtype).transpose(1, 2)
        visible = torch.empty(2, 1, 128, 128, dtype=torch.bool) if mask else None
    return Problem(query, key, key, visible, dropout, causal and not mask, grouped=kv_heads != 8)


bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("gpu", "options", "kernel"),
    [
        # measured: h200-wider-steps.jsonl and h200-operators.jsonl
        ("h200", {"dtype": bf16}, "cudnn"),
        ("h200", {"dtype": fp16, "kv_heads": 2}, "cudnn"),
        ("h200", {"dtype": bf16, "mask": True}, "cudnn"),
        ("h200", {"dtype": bf16, "head_dim": 256}, "cudnn"),
        ("h200", {"dtype": bf16, "dropout": 0.1}, "cudnn"),
        ("h200", {"dtype": fp32}, "efficient"),
        ("h200", {"dtype": fp32, "mask": True}, "efficient"),
        ("h200", {"dtype": fp32, "kv_heads": 2}, "math"),
        # sdp_utils.cpp: the head size must be a multiple of 8 for cuDNN, and is padded for flash
        ("h200", {"dtype": bf16, "head_dim": 60}, "flash"),
        ("h200", {"dtype": bf16, "head_dim": 60, "mask": True}, "math"),
        ("h200", {"dtype": bf16, "head_dim": 512}, "efficient"),
        ("a100-80g", {"dtype": bf16}, "flash"),
        ("a100-80g", {"dtype": bf16, "kv_heads": 2}, "flash"),
        ("a100-80g", {"dtype": bf16, "mask": True}, "efficient"),
        ("a100-80g", {"dtype": bf16, "mask": True, "kv_heads": 2}, "math"),
        ("a100-80g", {"dtype": bf16, "head_dim": 256}, "flash"),
        ("rtx4090", {"dtype": bf16, "head_dim": 256}, "flash"),
        ("rtx4090", {"dtype": bf16, "head_dim": 256, "dropout": 0.1}, "efficient"),
        ("rtx4090", {"dtype": bf16, "head_dim": 208}, "efficient"),
        ("t4", {"dtype": fp16}, "efficient"),
        ("t4", {"dtype": fp16, "kv_heads": 2}, "math"),
        ("t4", {"dtype": bf16}, "math"),
    ],
    ids=str,
)
def test_the_kernel_is_the_one_that_the_gpu_takes(gpu: str, options: dict[str, object], kernel: str) -> None:
    assert choose_kernel(problem(**options), find_gpu(gpu)) == kernel  # type: ignore[arg-type]
