"""Heads that peft adapts or trains in full, with the fused loss, against plain peft in fp64."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ligerprof.errors import KernelInputError
from ligerprof.kernels import apply
from tests.kernels.models import VOCAB, batch, tiny_model, train_once
from tests.kernels.oracle import relative_error
from tests.sampling import sampled

peft = pytest.importorskip("peft")

TOLERANCE = 2e-5


def assert_matches_fp64(model: Any, got: tuple[float, dict[str, Any]]) -> None:
    expected = train_once(copy.deepcopy(model).double())
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    assert got[1].keys() == expected[1].keys()
    errors = {name: relative_error(got[1][name], gradient) for name, gradient in expected[1].items()}
    assert max(errors.values()) < TOLERANCE, errors


def adapted(family: str, device: torch.device, *, tied: bool = False, **lora: Any) -> Any:
    model = tiny_model(family, device=device, tie_word_embeddings=tied)
    named = {"target_modules": ["lm_head", "q_proj"], "r": 4, "lora_alpha": 6, "init_lora_weights": False, **lora}
    return peft.get_peft_model(model, peft.LoraConfig(**named))


class LogitsMade(TorchDispatchMode):
    """Whether an operation returned the logits of all tokens of `batch`, or as many numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found |= isinstance(out, torch.Tensor) and out.numel() == 2 * 9 * VOCAB
        return out


# 16 rows of logits
SMALL_BUDGET = 16 * 4 * (VOCAB + 13)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gemma2", True)], ids=str)
def test_an_adapted_head_trains_as_in_plain_peft(family: str, tied: bool, device: torch.device) -> None:
    model = adapted(family, device, tied=tied)
    with apply(model, "all", flce_budget=SMALL_BUDGET), LogitsMade() as logits:
        got = train_once(model)
    assert not logits.found
    assert any("lm_head.lora_A" in name for name in got[1])
    assert_matches_fp64(model, got)
    with LogitsMade() as logits:
        train_once(model)
    assert logits.found


@pytest.mark.parametrize("provider", ["ligerprof", "torch"])
def test_several_adapters_their_scalings_and_rank(provider: str, device: torch.device) -> None:
    model = adapted("llama", device)
    other = {"target_modules": ["lm_head"], "r": 7, "use_rslora": True, "init_lora_weights": False}
    model.add_adapter("second", peft.LoraConfig(**other))
    model.base_model.set_adapter(["default", "second"])
    with apply(model, "all", provider=provider):
        got = train_once(model)
    assert sum("lm_head.lora_B" in name for name in got[1]) == 2
    assert_matches_fp64(model, got)


def test_adapters_that_are_disabled_merged_or_not_active(device: torch.device) -> None:
    model = adapted("llama", device)
    expected = {}
    for state in ("disabled", "merged", "unmerged"):
        for patched in (False, True):
            patch = apply(model, "flce") if patched else None
            if state == "merged":
                model.merge_adapter()
            with model.disable_adapter() if state == "disabled" else torch.enable_grad():
                loss = model(**batch(model)).loss.item()
            if state == "merged":
                model.unmerge_adapter()
            if patch is not None:
                patch.undo()
            assert loss == pytest.approx(expected.setdefault(state, loss), rel=1e-5)
    assert expected["merged"] == pytest.approx(expected["unmerged"], rel=1e-4)
    assert expected["disabled"] != pytest.approx(expected["unmerged"], rel=1e-3)


@sampled(
    ("saved", "order", "tied"),
    [
        (["lm_head"], "peft first", False),
        (["lm_head"], "kernels first", True),
        (["embed_tokens"], "kernels first", True),
        (["lm_head", "embed_tokens"], "peft first", True),
    ],
    ids=str,
    every=2,
)
def test_modules_trained_in_full(saved: list[str], order: str, tied: bool, device: torch.device) -> None:
    lora = {"target_modules": ["q_proj"], "modules_to_save": saved}
    if order == "peft first":
        model = adapted("llama", device, tied=tied, **lora)
        patch = apply(model, "all")
    else:
        plain = tiny_model("llama", device=device, tie_word_embeddings=tied)
        patch = apply(plain, "all")
        model = peft.get_peft_model(plain, peft.LoraConfig(r=4, init_lora_weights=False, **lora))
    got = train_once(model)
    patch.undo()
    assert any(f"{saved[0]}.modules_to_save" in name for name in got[1])
    assert_matches_fp64(model, got)


def test_adapters_that_come_after_the_kernels(device: torch.device) -> None:
    plain = tiny_model("mistral", device=device)
    classes = {name: type(module) for name, module in plain.named_modules()}
    patch = apply(plain, "flce", flce_budget=SMALL_BUDGET)
    model = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    with LogitsMade() as logits:
        got = train_once(model)
    patch.undo()
    assert not logits.found
    assert_matches_fp64(model, got)
    restored = {name: type(module) for name, module in model.unload().named_modules()}
    assert restored == classes


def test_dropout_of_an_adapter_draws_as_in_peft(device: torch.device) -> None:
    model = adapted("llama", device, lora_dropout=0.3)
    torch.manual_seed(3)
    expected = train_once(model)
    with apply(model, "flce"):
        torch.manual_seed(3)
        got = train_once(model)
    assert got[0] == pytest.approx(expected[0], rel=1e-5)


def test_under_autocast_the_adapters_compute_in_16_bit(device: torch.device) -> None:
    model = adapted("llama", device)
    exact = train_once(copy.deepcopy(model).double())
    errors = []
    for patched in (False, True):
        patch = apply(model, "flce") if patched else None
        with torch.autocast(device.type, torch.bfloat16):
            _, found = train_once(model)
        errors.append({name: relative_error(found[name], gradient) for name, gradient in exact[1].items()})
        if patch is not None:
            patch.undo()
    assert all(errors[1][name] < 1.5 * errors[0][name] + 5e-3 for name in errors[0])


@pytest.mark.parametrize(
    ("lora", "words"),
    [({"use_dora": True}, "DoraLinearVariant"), ({"lora_bias": True}, "has a bias")],
    ids=["dora", "bias"],
)
def test_other_adapters_on_the_head_are_refused_by_name(lora: dict[str, Any], words: str, device: torch.device) -> None:
    model = adapted("llama", device, **lora)
    with apply(model, "flce"), pytest.raises(KernelInputError, match=words) as caught:
        train_once(model)
    assert "\n" not in str(caught.value)
    with apply(model, "ce"):
        train_once(model)


def test_other_wrappers_of_the_head_are_refused_by_name(device: torch.device) -> None:
    config = peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[])
    model = peft.get_peft_model(tiny_model("llama", device=device, tie_word_embeddings=False), config)
    with pytest.raises(KernelInputError, match=r"peft\.tuners\.ia3\.layer\.Linear; the fused loss takes plain linear"):
        apply(model, "flce")


def test_a_kernel_that_takes_no_adapters_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from ligerprof.kernels.linear_cross_entropy import triton

    kernel = triton.fused_linear_cross_entropy

    def without(hidden: Any, weight: Any, labels: Any, options: Any, bias: Any, num_items: Any) -> Any:
        return kernel(hidden, weight, labels, options, bias, num_items)

    monkeypatch.setattr(triton, "fused_linear_cross_entropy", without)
    with pytest.raises(KernelInputError, match=r"LoRA adapters, which .* does not take"):
        apply(adapted("llama", torch.device("cpu")), "flce")


def test_liger_kernels_loss_would_ignore_adapters() -> None:
    pytest.importorskip("liger_kernel")
    with pytest.raises(KernelInputError, match="adapters, which liger's fused loss does not take"):
        apply(adapted("llama", torch.device("cpu")), "flce", provider="liger", device_kind="simulated")


def test_a_head_that_returns_a_part_of_the_logits_is_refused() -> None:
    model = tiny_model("mistral")
    # as ColwiseParallel does with output_layouts=Shard(-1)
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits[..., : VOCAB // 2])
    with (
        apply(model, "ce", provider="torch"),
        pytest.raises(KernelInputError, match=f"a part of the logits of {VOCAB}"),
    ):
        train_once(model)


def test_a_tensor_parallel_head_is_refused_in_one_line(single_rank: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    model = tiny_model("llama", tie_word_embeddings=False)
    model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), single_rank, [Shard(0)]))
    with apply(model, "flce"), pytest.raises(KernelInputError, match=r"split over ranks \(a DTensor placed") as caught:
        train_once(model)
    assert "\n" not in str(caught.value)


@sampled(
    ("tied", "group", "lora"),
    [(False, "head", ["lm_head"]), (True, "root", ["lm_head"]), (True, "root", None), (False, "head", None)],
    ids=str,
    every=2,
)
def test_sharded_heads_under_fsdp2(tied: bool, group: str, lora: list[str] | None, single_rank: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model = tiny_model("llama", tie_word_embeddings=tied)
    if lora is not None:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=lora, init_lora_weights=False))
    expected = train_once(model)
    apply(model, "all")
    inner = model if lora is None else model.get_base_model()
    for layer in inner.model.layers:
        fully_shard(layer, mesh=single_rank)
    if group == "head" and not tied:
        fully_shard([inner.model.norm, inner.lm_head], mesh=single_rank)
    fully_shard(model, mesh=single_rank)
    loss, gradients = train_once(model)
    assert loss == pytest.approx(expected[0], rel=1e-5)
    whole = {name: gradient.full_tensor() for name, gradient in gradients.items()}
    assert whole.keys() == expected[1].keys()
    assert max(relative_error(whole[name], gradient) for name, gradient in expected[1].items()) < TOLERANCE


@sampled(
    ("tied", "lora"),
    [
        (False, {"target_modules": ["lm_head", "q_proj"]}),
        (True, {"target_modules": ["lm_head", "q_proj"]}),
        (False, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        (True, None),
    ],
    ids=str,
    every=2,
)
def test_heads_whose_weights_exist_only_within_their_modules_calls(tied: bool, lora: dict[str, Any] | None) -> None:
    """As under ZeRO-3: hooks gather the parameters of each module around its forward and its backward."""
    model = tiny_model("llama", tie_word_embeddings=tied)
    if lora is not None:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **lora))
    expected = train_once(copy.deepcopy(model).double())
    apply(model, "all")
    with gathered_by_modules(model):
        loss, gradients = train_once(model)
    assert loss == pytest.approx(expected[0], rel=1e-5)
    assert gradients.keys() == expected[1].keys()
    assert max(relative_error(gradients[name], gradient) for name, gradient in expected[1].items()) < TOLERANCE


@contextmanager
def gathered_by_modules(model: nn.Module) -> Iterator[None]:
    """Keep the parameters empty, but for the time in which a module that has them runs."""
    whole = {parameter: parameter.data for parameter in model.parameters()}
    users = dict.fromkeys(whole, 0)

    def gather(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            users[parameter] += 1
            parameter.data = whole[parameter]

    def release(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            users[parameter] -= 1
            if not users[parameter]:
                parameter.data = whole[parameter].new_empty(0)

    for parameter in whole:
        parameter.data = parameter.data.new_empty(0)
    handles = []
    for module in model.modules():
        if not module._parameters:
            continue
        handles.append(module.register_forward_pre_hook(gather))
        handles.append(module.register_forward_hook(release))
        # gathered from the backward of its output until the end, when its gradients are accumulated
        handles.append(module.register_full_backward_pre_hook(gather))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, data in whole.items():
            parameter.data = data


@pytest.fixture
def single_rank() -> Iterator[Any]:
    """A device mesh of this process alone."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def test_an_adapted_head_in_a_compiled_graph(device: torch.device) -> None:
    plain = tiny_model("llama", device=device, num_hidden_layers=1)
    model = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    expected = train_once(model)
    with apply(model, "flce"):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        model.zero_grad()
        loss = compiled(**batch(model)).loss
        loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert loss.item() == pytest.approx(expected[0], rel=1e-5)
    assert found.keys() == expected[1].keys()
    assert max(relative_error(found[name], gradient) for name, gradient in expected[1].items()) < TOLERANCE
