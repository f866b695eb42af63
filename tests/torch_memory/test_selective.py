import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ligerprof.runs.activation_offload import selective_contexts
from ligerprof.torch_memory.saved_tensors import (
    FUSED_ATTENTION,
    MATMULS,
    Selection,
    find_policy,
    layer_runs,
    policy_text,
)


def test_a_policy_keeps_the_first_of_each_group_of_calls() -> None:
    selection = Selection(find_policy("aten.mm.default/3+aten.bmm.default"))
    assert [selection.keeps("aten.mm.default") for _ in range(7)] == [True, False, False, True, False, False, True]
    assert [selection.keeps(name) for name in ("aten.bmm.default", "aten.add.Tensor")] == [True, False]


def test_products_of_some_shapes_are_neither_kept_nor_counted() -> None:
    policy = find_policy("torchtitan-8x2")
    assert policy_text(policy).startswith("aten._scaled_dot_product_cudnn_attention.default+")
    assert find_policy(policy_text(policy)) == policy
    selection = Selection(policy)
    kept = [selection.keeps("aten.mm.default", shape) for shape in ((4, 4), (8, 2), (4, 4), (2, 8), (4, 4))]
    assert kept == [True, False, False, True, False]
    assert selection.keeps("aten.bmm.default", (8, 2))


@pytest.mark.parametrize(
    "text",
    [
        *("", "mm", "aten.mm", "aten.mm.default/0", "aten.mm.default+", "a.b.c.d", "aten.mm.default/x"),
        *("matmuls+mm", "torchtitan/2", "aten.bmm.default-2x2", "aten.mm.default-2", "matmuls-0x2"),
    ],
)
def test_other_texts_are_not_policies(text: str) -> None:
    with pytest.raises(ValueError, match=r"^[a-z./0-9-]*$"):
        find_policy(text)


def test_runs_of_layers_have_a_policy_each() -> None:
    runs = layer_runs("2*nothing,3*matmuls-8x2+attention, 1*everything")
    assert [(run.layers, run.name) for run in runs] == [(2, "nothing"), (3, "matmuls-8x2+attention"), (1, "everything")]
    assert [None if run.policy is None else sorted(run.policy.every) for run in runs] == [
        [],
        sorted((*MATMULS, *FUSED_ATTENTION)),
        None,
    ]
    for text in ("2*", "0*nothing", "2*mm", "nothing,2*nothing", "2*nothing,", "everything"):
        with pytest.raises(ValueError, match=r"^[a-z0-9*]*$"):
            layer_runs(text)


def test_torch_has_the_operators() -> None:
    for name in (*MATMULS, *FUSED_ATTENTION):
        found = torch.ops
        for part in name.split("."):
            found = getattr(found, part)
        assert str(found) == name


@pytest.mark.parametrize(("policy", "products"), [("matmuls", 3), ("aten.mm.default/2", 4), ("attention", 6)])
def test_torch_computes_again_what_is_not_kept(policy: str, products: int) -> None:
    """Three products, of which the last is not reached by the recomputation, and two gradients of each."""
    weights = [torch.rand(4, 4, requires_grad=True) for _ in range(3)]
    calls = 0

    class Counter(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    def region(value: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            value = (value @ weight).sin()
        return value

    with Counter():
        source = torch.rand(4, 4)
        result = checkpoint(region, source, use_reentrant=False, context_fn=selective_contexts(find_policy(policy)))
        before = calls
        result.sum().backward()
    # two gradients for each but the first, whose input needs none
    assert (before, calls - before - 5) == (3, products - 3)


def test_gradients_are_those_without_checkpointing() -> None:
    weights = [torch.rand(4, 4, requires_grad=True) for _ in range(3)]

    def region(value: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            value = torch.nn.functional.scaled_dot_product_attention(*[(value @ weight).view(1, 1, 4, 4)] * 3)[0, 0]
        return value

    source, found = torch.rand(4, 4), []
    for policy in (None, "matmuls+attention", "aten.mm.default/2", "nothing"):
        contexts = {} if policy is None else {"context_fn": selective_contexts(find_policy(policy))}
        result = region(source) if policy is None else checkpoint(region, source, use_reentrant=False, **contexts)
        assert isinstance(result, torch.Tensor)
        found.append(torch.autograd.grad(result.sum(), weights))
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


@pytest.mark.parametrize("fault", ["written to", "backward once"])
def test_what_was_kept_is_not_reused_wrongly(fault: str) -> None:
    weight = torch.rand(4, 4, requires_grad=True)

    def region(value: torch.Tensor) -> torch.Tensor:
        product = value @ weight
        # its input is computed again, its output changes what was kept
        return (product.mul_(2.0) if fault == "written to" else product).sin().cos()

    contexts = selective_contexts(find_policy("matmuls"))
    result = checkpoint(region, torch.rand(4, 4), use_reentrant=False, context_fn=contexts)
    if fault == "backward once":
        result.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=fault):
        result.sum().backward()


def test_compiled_regions_have_the_modes_of_torch() -> None:
    from torch._guards import TracingContext, tracing
    from torch.utils.checkpoint import _CachingTorchDispatchMode

    contexts = selective_contexts(find_policy("matmuls"))
    assert not isinstance(contexts()[0], _CachingTorchDispatchMode)
    with tracing(TracingContext(None)):
        assert isinstance(contexts()[0], _CachingTorchDispatchMode)
