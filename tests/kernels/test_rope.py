"""RoPE against its reference in fp64, in every layout that attention hands over."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ligerprof.errors import KernelInputError
from ligerprof.kernels.rope.reference import apply_rope as reference
from tests.kernels.oracle import DTYPES, ROUNDING, assert_matches_fp64, leaves, run
from tests.sampling import sampled

TOKENS, DIM = 7, 20


def rope(*given: Tensor, unsqueeze_dim: int = 1, in_place: bool = False) -> tuple[Tensor, Tensor]:
    from ligerprof.kernels.rope.triton import apply_rope

    return apply_rope(*given, unsqueeze_dim=unsqueeze_dim, in_place=in_place)


def angles(batch: int, device: torch.device, dtype: torch.dtype = torch.float32, dim: int = DIM) -> list[Tensor]:
    angle = torch.randn(batch, TOKENS, dim, device=device)
    return [angle.cos().to(dtype), angle.sin().to(dtype)]


def queries_and_keys(batch: int, heads: int, kv_heads: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """As a linear layer's output is viewed: [B, T, H, D] in memory, [B, H, T, D] by shape."""
    sizes = ((batch, TOKENS, heads, DIM), (batch, TOKENS, kv_heads, DIM))
    return leaves(*(torch.randn(size, dtype=dtype, device=device).transpose(1, 2) for size in sizes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@sampled(("batch", "heads", "kv_heads"), [(2, 6, 2), (1, 1, 1), (1, 3, 3)], ids=str, every=3)
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


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_queries_and_keys_of_two_dtypes(
    dtypes: tuple[torch.dtype, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps its dtype; a launch on a GPU compiles for one dtype only, unlike the interpreter."""
    from ligerprof.kernels.rope import triton

    launched: list[tuple[torch.dtype, torch.dtype]] = []
    launch = triton._rotate

    def recorded(q: Tensor, k: Tensor, *given: Tensor, **named: bool) -> tuple[Tensor, Tensor]:
        launched.append((q.dtype, k.dtype))
        return launch(q, k, *given, **named)

    monkeypatch.setattr(triton, "_rotate", recorded)
    q, k = leaves(*(torch.randn(2, 3, TOKENS, DIM, device=device).to(dtype) for dtype in dtypes))
    assert tuple(turned.dtype for turned in rope(q, k, *angles(1, device))) == dtypes
    assert_matches_fp64(rope, reference, [q, k, *angles(1, device)], max(ROUNDING[dtype] for dtype in dtypes))
    assert launched == [(torch.float32, torch.float32)] * 3


def test_halves_of_the_angles_that_differ(device: torch.device) -> None:
    """Each half of a head has its own angles in the general form."""
    q, k = queries_and_keys(1, 2, 1, device, torch.float32)
    cos, sin = torch.randn(1, TOKENS, DIM, device=device), torch.randn(1, TOKENS, DIM, device=device)
    assert_matches_fp64(rope, reference, [q, k, cos, sin], ROUNDING[torch.float32])


def test_shapes_that_do_not_go_together_are_refused(device: torch.device) -> None:
    q, k = queries_and_keys(1, 2, 1, device, torch.float32)
    # an odd number of angles, and more than a head has elements
    for dim in (DIM - 1, DIM + 2):
        with pytest.raises(KernelInputError, match="rope"):
            rope(q, k, *angles(1, device, dim=dim))


def in_place(*given: Tensor) -> tuple[Tensor, Tensor]:
    return rope(*given, in_place=True)


# what makes queries and keys of their own from leaves, as a linear layer does: the same strides, gaps between the
# tokens, heads before tokens
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "same-strides": torch.clone,
    "gaps": lambda x: functional.pad(x.transpose(1, 2), (0, 0, 0, 1))[:, :, :-1].transpose(1, 2),
    "heads-first": lambda x: x.clone(memory_format=torch.contiguous_format),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@sampled("made", MADE, every=2)
def test_in_place_matches_fp64_where_the_inputs_lay(made: str, dtype: torch.dtype, device: torch.device) -> None:
    q, k = queries_and_keys(2, 6, 2, device, dtype)
    grads = [torch.randn(x.shape, dtype=dtype, device=device) for x in (q, k)]

    def on_new_ones(q: Tensor, k: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        before = [MADE[made](x) for x in (q, k)]
        turned = in_place(*before, *given)
        for old, new in zip(before, turned, strict=True):
            assert (new.data_ptr(), new.stride()) == (old.data_ptr(), old.stride())
        return turned

    assert_matches_fp64(on_new_ones, reference, [q, k, *angles(2, device)], ROUNDING[dtype], grads)


def unfit_pairs(device: torch.device) -> dict[str, list[Tensor]]:
    """Queries and keys that cannot be overwritten, and with some a tensor more on their memory."""

    def new(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device)

    both = new(1, 4, TOKENS, DIM)
    kept = new(1, 3, TOKENS, DIM)
    return {
        "one-memory": list(both.split((3, 1), dim=1)),
        "one-tensor": [new(1, 3, TOKENS, DIM)] * 2,
        "somebody-elses-too": [kept, new(1, 1, TOKENS, DIM), kept.detach()],
        "one-key-for-all-heads": [new(1, 3, TOKENS, DIM), new(1, 1, TOKENS, DIM).expand(1, 3, TOKENS, DIM)],
        "overlapping-rows": [new(TOKENS + DIM).as_strided((1, 1, TOKENS, DIM), (0, 0, 1, 1)), new(1, 3, TOKENS, DIM)],
        "strides-in-the-last-axis": [new(1, 3, TOKENS, DIM), new(1, 1, DIM, TOKENS).transpose(2, 3)],
        "leaves": leaves(new(1, 3, TOKENS, DIM), new(1, 1, TOKENS, DIM)),
        "views-of-leaves": [x.transpose(1, 2) for x in leaves(new(1, TOKENS, 3, DIM), new(1, TOKENS, 1, DIM))],
        "keys-of-another-dtype": [new(1, 3, TOKENS, DIM).half(), *leaves(new(1, 1, TOKENS, DIM))],
    }


@sampled("name", unfit_pairs(torch.device("cpu")), every=2)
def test_in_place_leaves_alone_what_it_cannot_overwrite(name: str, device: torch.device) -> None:
    q, k, *_ = kept = unfit_pairs(device)[name]
    before, cos_and_sin = [x.detach().clone() for x in kept], angles(1, device)
    turned, right = in_place(q, k, *cos_and_sin), rope(*before[:2], *cos_and_sin)
    assert all(torch.equal(*pair) for pair in zip(turned, right, strict=True))
    assert all(torch.equal(*pair) for pair in zip(kept, before, strict=True))
    assert (q._version, k._version) == (0, 0)


def test_inputs_are_left_alone_unless_the_caller_allows_it(device: torch.device) -> None:
    q, k = (x.clone() for x in queries_and_keys(1, 2, 1, device, torch.float32))
    before = [x.detach().clone() for x in (q, k)]
    rope(q, k, *angles(1, device))
    assert all(torch.equal(*pair) for pair in zip((q, k), before, strict=True))
    assert (q._version, k._version) == (0, 0)


@pytest.mark.parametrize("kept", [0, 1], ids=["queries", "keys"])
def test_overwritten_values_that_are_still_needed_raise(kept: int, device: torch.device) -> None:
    given = [x.clone() for x in queries_and_keys(1, 2, 1, device, torch.float32)]
    squares = given[kept].square().sum()
    turned = in_place(*given, *angles(1, device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (squares + turned[0].sum() + turned[1].sum()).backward()


def test_what_a_recomputation_keeps_is_left_alone(device: torch.device) -> None:
    """Checkpointing that is not reentrant looks at no versions."""

    def layer(rotate: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, *turn: Tensor) -> tuple[Tensor, ...]:
        q, k = q.clone(), k.clone()
        return q.square(), k.exp(), *rotate(q, k, *turn)

    inputs = [*queries_and_keys(1, 2, 1, device, torch.float32), *angles(1, device)]
    recomputed = partial(checkpoint, layer, in_place, use_reentrant=False)
    assert_matches_fp64(recomputed, partial(layer, reference), inputs, ROUNDING[torch.float32])


# how torch.utils.checkpoint is called; selected: the products are kept, under other tensors than the model's own
CHECKPOINTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "all": {},
    "selected": {"context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])},
}


@sampled("checkpointing", CHECKPOINTS, every=2)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_in_place_behind_linear_layers(checkpointing: str, autocast: bool, device: torch.device) -> None:
    states = torch.randn(2, TOKENS, 24, device=device)
    weights = [torch.randn(heads * DIM, 24, device=device) / 5 for heads in (4, 2)]
    cos, sin = angles(1, device)

    def attend(rotate: Callable[..., tuple[Tensor, Tensor]], *given: Tensor) -> Tensor:
        x, q_weight, k_weight, *turn = given
        q, k = (functional.linear(x, w).view(2, TOKENS, -1, DIM).transpose(1, 2) for w in (q_weight, k_weight))
        q, k = rotate(q, k, *turn)
        return functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)

    def layer(*given: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            options = CHECKPOINTS[checkpointing]
            if options is None:
                return attend(in_place, *given)
            output: Tensor = checkpoint(attend, in_place, *given, use_reentrant=False, **options)
            return output

    # products, rotation, attention and each gradient are rounded
    tolerance = 5 * ROUNDING[torch.bfloat16 if autocast else torch.float32]
    inputs = [*leaves(states, *weights), cos, sin]
    assert_matches_fp64(layer, lambda *given: attend(reference, *given), inputs, tolerance)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_place_without_a_graph(mode: Callable[[], Any], device: torch.device) -> None:
    leaf_q, leaf_k = queries_and_keys(1, 2, 1, device, torch.float32)
    cos, sin = angles(1, device)
    with mode():
        right = rope(leaf_q, leaf_k, cos, sin)
        q, k = leaf_q.clone(), leaf_k.clone()
        turned = in_place(q, k, cos, sin)
        assert (turned[0].data_ptr(), turned[1].data_ptr()) == (q.data_ptr(), k.data_ptr())
        assert all(torch.equal(*pair) for pair in zip(turned, right, strict=True))


FORMS = {
    "partial": ((2, 3, 5, 20), (2, 2, 5, 20), (1, 5, 12), {}),
    "partial-of-an-odd-head": ((2, 3, 5, 17), (2, 2, 5, 17), (2, 5, 10), {}),
    "interleaved": ((2, 3, 5, 12), (2, 2, 5, 12), (1, 5, 12), {"interleaved": True}),
    "interleaved-partial": ((2, 5, 3, 13), (2, 5, 2, 13), (2, 5, 8), {"interleaved": True, "unsqueeze_dim": 2}),
    "angles-without-sequences": ((2, 5, 3, 12), (2, 5, 2, 12), (5, 12), {"unsqueeze_dim": 1}),
    "heads-first-without-sequences": ((2, 3, 5, 12), (2, 2, 5, 12), (5, 12), {"unsqueeze_dim": 0}),
    "vision": ((5, 3, 12), (5, 2, 12), (5, 12), {"unsqueeze_dim": -2}),
    "one-sequence-heads-first": ((3, 5, 12), (2, 5, 12), (5, 8), {"unsqueeze_dim": 0}),
}


@sampled("in_place", [False, True], every=2)
@pytest.mark.parametrize("name", FORMS)
def test_other_forms(name: str, in_place: bool, device: torch.device) -> None:
    from ligerprof.kernels.rope.triton import apply_rope

    q_shape, k_shape, angle_shape, named = FORMS[name]
    q, k, cos, sin = (torch.randn(size, device=device) for size in (q_shape, k_shape, angle_shape, angle_shape))
    grads = [torch.randn(size, device=device) for size in (q_shape, k_shape)]
    assert_matches_fp64(
        # not leaves, which are never overwritten
        lambda q, k: apply_rope(q * 1.0, k * 1.0, cos, sin, in_place=in_place, **named),
        lambda q, k: reference(q, k, cos.cpu().double(), sin.cpu().double(), **named),
        leaves(q, k),
        ROUNDING[torch.float32],
        grads,
    )


@sampled("name", FORMS, every=2)
def test_one_tensor_of_heads(name: str, device: torch.device) -> None:
    from ligerprof.kernels.rope.triton import rotate

    x_shape, _, angle_shape, named = FORMS[name]
    cos, sin = (torch.randn(angle_shape, device=device) for _ in range(2))

    def in_its_memory(x: Tensor) -> Tensor:
        before = x * 1.0
        turned = rotate(before, cos, sin, in_place=True, **named)
        assert turned.data_ptr() == before.data_ptr()
        return turned

    for rotation in (lambda x: rotate(x, cos, sin, **named), in_its_memory):
        assert_matches_fp64(
            rotation,
            lambda x: reference(x, x, cos.cpu().double(), sin.cpu().double(), **named)[0],
            leaves(torch.randn(x_shape, device=device)),
            ROUNDING[torch.float32],
            [torch.randn(x_shape, device=device)],
        )
