from typing import Any

import pytest

from ligerprof.gpus import find_gpu
from ligerprof.torch_memory.attention import AttentionProblem, choose_kernel

bf16, fp16, fp32 = "bfloat16", "float16", "float32"


def problem(
    dtype: str, *, head_dim: int = 64, kv_heads: int = 8, mask: bool = False, dropout: float = 0.0
) -> AttentionProblem:
    return AttentionProblem(
        dtype=dtype,
        batch=2,
        heads=8,
        kv_heads=kv_heads,
        queries=128,
        keys=128,
        head_dim=head_dim,
        value_dim=head_dim,
        masked=mask,
        causal=not mask,
        dropout=dropout,
        grouped=kv_heads != 8,
    )


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
        ("t4", {"dtype": fp16, "head_dim": 60}, "math"),
        # no tensor cores, whose loads have to be aligned
        ("p100", {"dtype": fp16, "head_dim": 60}, "efficient"),
        ("p100", {"dtype": bf16}, "math"),
        ("b300", {"dtype": bf16}, "cudnn"),
    ],
    ids=str,
)
def test_the_kernel_is_the_one_that_the_gpu_takes(gpu: str, options: dict[str, Any], kernel: str) -> None:
    assert choose_kernel(problem(**options), find_gpu(gpu)) == kernel
