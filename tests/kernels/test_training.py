"""Ten training steps with and without kernels: the loss curves stay together."""

import pytest
import torch

from ligerprof.kernels import apply
from tests.kernels.models import batch, tiny_model

STEPS = 10
# largest distance of two losses at the same step; both start at 5.4. In bf16 the kernels round less often than
# plain torch, and Triton's interpreter truncates
LOSS_CURVE_BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def loss_curve(family: str, dtype: torch.dtype, device: torch.device, kernels: str | None) -> torch.Tensor:
    """Losses of AdamW steps on one batch."""
    model = tiny_model(family, dtype=dtype, device=device, num_hidden_layers=1)
    tokens = batch(model, sequences=1, tokens=8)
    if kernels is not None:
        apply(model, kernels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(**tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).float().cpu()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float32),
        pytest.param("gpt2", torch.float32, marks=pytest.mark.slow),
        pytest.param("llama", torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_loss_curves_with_and_without_kernels_stay_together(
    family: str, dtype: torch.dtype, device: torch.device
) -> None:
    plain = loss_curve(family, dtype, device, None)
    fused = loss_curve(family, dtype, device, "all")
    assert plain[-1] < plain[0] - 0.5
    distance = (plain - fused).abs().max().item()
    assert distance <= LOSS_CURVE_BOUND[dtype], distance
