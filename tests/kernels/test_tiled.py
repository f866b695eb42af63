"""A gated MLP some tokens at a time, against plain torch in fp64; its memory, and its place in a model."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ligerprof.errors import KernelInputError, KernelUnavailableError, RecipeError
from ligerprof.runs.kernel_check.check import ByteMeter
from tests.kernels.oracle import ROUNDING, assert_matches_fp64, leaves, relative_error
from tests.sampling import sampled

HIDDEN, INNER = 24, 40
ACTIVATIONS = {
    "swiglu": functional.silu,
    "geglu": lambda gate: functional.gelu(gate, approximate="tanh"),
    "geglu_exact": functional.gelu,
}


def problem(device: torch.device, tokens: tuple[int, ...] = (2, 9), dtype: torch.dtype = torch.float32) -> list[Tensor]:
    x = torch.randn(*tokens, HIDDEN, device=device)
    weights = [torch.randn(INNER, HIDDEN, device=device) * 0.3 for _ in range(2)]
    return leaves(*(v.to(dtype) for v in (x, *weights, torch.randn(HIDDEN, INNER, device=device) * 0.3)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@sampled("tile", [1000, 7, 1], every=2)
def test_tiles_compute_what_the_whole_does(tile: int, activation: str, device: torch.device) -> None:
    from ligerprof.kernels.gated.tiled import tiled_gated_mlp

    assert_matches_fp64(
        lambda x, g, u, d: tiled_gated_mlp(x, g, u, d, activation, tile_tokens=tile),
        lambda x, g, u, d: (ACTIVATIONS[activation](x @ g.t()) * (x @ u.t())) @ d.t(),
        problem(device),
        3 * ROUNDING[torch.float32],
        [torch.randn(2, 9, HIDDEN, device=device)],
    )


def test_autocast_frozen_weights_and_no_tokens(device: torch.device) -> None:
    from ligerprof.kernels.gated.tiled import tiled_gated_mlp

    x, g, u, d = problem(device)
    with torch.autocast(device.type, torch.bfloat16):
        y = tiled_gated_mlp(x, g, u, d, tile_tokens=7)
    assert y.dtype == torch.bfloat16
    exact = (functional.silu(x @ g.t()) * (x @ u.t())) @ d.t()
    grads = torch.autograd.grad(y.float().sum(), (x, g, u, d))
    for found, truth in zip((y, *grads), (exact, *torch.autograd.grad(exact.sum(), (x, g, u, d))), strict=True):
        assert relative_error(found, truth) < 4 * ROUNDING[torch.bfloat16]
        assert found.dtype == (torch.bfloat16 if found is y else torch.float32)
    frozen = [value.detach() for value in (g, u, d)]
    (grad,) = torch.autograd.grad(tiled_gated_mlp(x, *frozen, tile_tokens=5).sum(), (x,))
    assert relative_error(grads[0], grad) < 4 * ROUNDING[torch.bfloat16]
    empty = problem(device, (0,))
    found = torch.autograd.grad(tiled_gated_mlp(*empty).sum(), empty)
    assert all(not value.any() for value in found)


def test_gates_of_one_tile_exist_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward keeps nothing but the input; also checkpointed, the gates are never recomputed for all tokens.

    The row kernels are plain torch here, because Triton's interpreter keeps tensors of earlier launches.
    """
    from ligerprof.kernels.gated import tiled

    def differentiate(grad: Tensor, gate: Tensor, up: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
        return gate, up, grad

    monkeypatch.setattr(tiled, "multiply_gates", lambda gate, _up, _activation: gate)
    monkeypatch.setattr(tiled, "differentiate_gates", differentiate)
    tokens, tile = 64, 8
    inputs = problem(torch.device("cpu"), (tokens,))
    state_bytes = inputs[0].nbytes
    for wrap in (lambda call: call(), lambda call: checkpoint(call, use_reentrant=False)):
        with ByteMeter(inputs) as meter:
            y = wrap(lambda: tiled.tiled_gated_mlp(*inputs, tile_tokens=tile))
            assert meter.live_bytes <= state_bytes + 8
            assert meter.peak_bytes <= state_bytes + 3 * tile * INNER * 4 + 8
            meter.peak_bytes = meter.live_bytes
            grads = torch.autograd.grad(y, inputs, torch.ones_like(y))
        made = state_bytes + sum(grad.nbytes for grad in grads)
        assert meter.peak_bytes <= state_bytes + made + 3 * tile * INNER * 4 + 8
        # the whole sequence's gates alone would take more
        assert 3 * tile * INNER * 4 * 4 < 3 * tokens * INNER * 4


def test_a_patched_model_computes_its_mlps_in_tiles(device: torch.device) -> None:
    import transformers

    import ligerprof.kernels

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=60
    )
    model = transformers.LlamaForCausalLM(config).to(device)
    ids = torch.randint(0, 60, (2, 9), device=device)
    expected = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    with ligerprof.kernels.apply(model, "swiglu", mlp_tile_tokens=5):
        found = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
        assert type(model.model.layers[0].mlp).__name__ == "LlamaMLP"
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-5
    with pytest.raises(RecipeError, match="need ligerprof's swiglu"):
        ligerprof.kernels.apply(model, "rms", mlp_tile_tokens=5)
    with_bias = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_diff_dict() | {"mlp_bias": True}))
    with pytest.raises(KernelUnavailableError, match="cannot run in tiles"):
        ligerprof.kernels.apply(with_bias.to(device), "swiglu", mlp_tile_tokens=5)


def test_shapes_that_do_not_match_are_errors(device: torch.device) -> None:
    from ligerprof.kernels.gated.tiled import tiled_gated_mlp

    x, g, u, d = problem(device)
    with pytest.raises(KernelInputError, match=r"Give \[I, 24\]"):
        tiled_gated_mlp(x, g.t(), u, d)
    with pytest.raises(KernelInputError, match=r"Give \[H, 40\]"):
        tiled_gated_mlp(x, g, u, d, tile_tokens=0)
