"""RoPE against its reference in fp64, in every layout that attention hands over."""

import pytest
import torch
from torch import Tensor

from ligerprof.errors import KernelInputError
from ligerprof.kernels.rope.reference import apply_rope as reference
from tests.kernels.oracle import DTYPES, ROUNDING, assert_matches_fp64, leaves, run

TOKENS, DIM = 7, 20


def rope(*given: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    from ligerprof.kernels.rope.triton import apply_rope

    return apply_rope(*given, unsqueeze_dim=unsqueeze_dim)


def angles(batch: int, device: torch.device, dtype: torch.dtype = torch.float32, dim: int = DIM) -> list[Tensor]:
    angle = torch.randn(batch, TOKENS, dim, device=device)
    return [angle.cos().to(dtype), angle.sin().to(dtype)]


def queries_and_keys(batch: int, heads: int, kv_heads: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """As a linear layer's output is viewed: [B, T, H, D] in memory, [B, H, T, D] by shape."""
    sizes = ((batch, TOKENS, heads, DIM), (batch, TOKENS, kv_heads, DIM))
    return leaves(*(torch.randn(size, dtype=dtype, device=device).transpose(1, 2) for size in sizes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 1, 1), (2, 6, 2), (1, 3, 3)], ids=str)
def test_matches_fp64(batch: int, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
    q, k = queries_and_keys(batch, heads, kv_heads, device, dtype)
    # attention's gradients are contiguous as [B, H, T, D], unlike its inputs
    grads = [torch.randn(x.shape, dtype=dtype, device=device) for x in (q, k)]
    assert_matches_fp64(rope, reference, [q, k, *angles(1, device)], ROUNDING[dtype], grads)


def test_one_row_of_angles_a_sequence_in_16_bit(device: torch.device) -> None:
    q, k = queries_and_keys(3, 2, 2, device, torch.bfloat16)
    assert_matches_fp64(rope, reference, [q, k, *angles(3, device, torch.bfloat16)], ROUNDING[torch.bfloat16])


def test_tokens_before_heads(device: torch.device) -> None:
    q, k = leaves(*(torch.randn(2, TOKENS, heads, DIM, device=device) for heads in (4, 2)))
    assert_matches_fp64(
        lambda *given: rope(*given, unsqueeze_dim=2),
        lambda *given: reference(*given, unsqueeze_dim=2),
        [q, k, *angles(2, device)],
        ROUNDING[torch.float32],
    )


def test_results_lie_as_linear_layers_want_them_both_ways(device: torch.device) -> None:
    q, k = queries_and_keys(2, 6, 2, device, torch.float32)
    grads = [torch.randn(x.shape, device=device) for x in (q, k)]
    for value in run(rope, [q, k, *angles(1, device)], grads):
        assert value.transpose(1, 2).is_contiguous()


def test_more_heads_than_a_tile_and_strides_in_the_last_axis(device: torch.device) -> None:
    q = torch.randn(1, TOKENS, 130, 2 * DIM, device=device)[..., ::2].transpose(1, 2).requires_grad_()
    k = torch.randn(1, 3, DIM, TOKENS, device=device).transpose(2, 3).requires_grad_()
    assert_matches_fp64(rope, reference, [q, k, *angles(1, device)], ROUNDING[torch.float32])


def test_halves_of_the_angles_that_differ(device: torch.device) -> None:
    """Each half of a head has its own angles in the general form."""
    q, k = queries_and_keys(1, 2, 1, device, torch.float32)
    cos, sin = torch.randn(1, TOKENS, DIM, device=device), torch.randn(1, TOKENS, DIM, device=device)
    assert_matches_fp64(rope, reference, [q, k, cos, sin], ROUNDING[torch.float32])


def test_shapes_that_do_not_go_together_are_refused(device: torch.device) -> None:
    q, k = queries_and_keys(1, 2, 1, device, torch.float32)
    with pytest.raises(KernelInputError, match="rope"):
        rope(q, k, *angles(1, device, dim=DIM // 2))
