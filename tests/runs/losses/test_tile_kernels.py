"""The Triton kernels of the loss in tiles against its plain torch code, in the interpreter."""

import pytest
import torch

from ligerprof.runs.losses import tile_kernels
from ligerprof.runs.losses.tiled_log_probabilities import differentiate, fold


@pytest.mark.parametrize("cap", [None, 3.0])
def test_kernels_compute_what_torch_computes(cap: float | None) -> None:
    torch.manual_seed(0)
    tokens, words, first = 3, 1500, 100
    buffer = 4 * torch.randn(tokens, 2048)
    # a label before the tile, in it, and behind it
    labels = torch.tensor([5, 1200, 4000])
    plain = (torch.zeros(tokens), torch.ones(tokens), torch.zeros(tokens), torch.zeros(tokens), torch.zeros(tokens))
    fused = tuple(item.clone() for item in plain)
    fold(buffer[:, :words], labels, first, cap, plain)
    tile_kernels.launch_fold(buffer[:, :words], labels, first, cap, fused)
    torch.testing.assert_close(fused, plain)

    normalizer, gradient = plain[0] + torch.log(plain[1]), torch.randn(tokens)
    again = buffer.clone()
    differentiate(buffer[:, :words], labels, first, cap, normalizer, gradient)
    tile_kernels.launch_differentiate(again[:, :words], labels, first, cap, normalizer, gradient)
    torch.testing.assert_close(again, buffer, rtol=1e-4, atol=1e-6)
