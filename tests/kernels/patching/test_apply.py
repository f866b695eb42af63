"""Kernels in models: every family trains as before, and undoing leaves no trace."""

import copy
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from ligerprof.errors import KernelInputError, KernelUnavailableError, RecipeError
from ligerprof.kernels import Patch, apply, find_kernel
from ligerprof.kernels.device import simulated_device
from ligerprof.kernels.registry import require_available
from ligerprof.models import ARCHITECTURES
from tests.kernels.models import (
    FAMILIES,
    VOCAB,
    batch,
    every_tiny_model,
    fingerprint,
    tiny_config,
    tiny_model,
    train_once,
)
from tests.kernels.oracle import relative_error
from tests.sampling import sampled

# fp32 through two layers and back: the kernels add in another order
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 2e-5


def assert_same_step(expected: tuple[float, dict[str, Any]], got: tuple[float, dict[str, Any]]) -> None:
    assert got[0] == pytest.approx(expected[0], rel=LOSS_TOLERANCE)
    assert got[1].keys() == expected[1].keys()
    errors = {name: relative_error(got[1][name], gradient) for name, gradient in expected[1].items()}
    assert max(errors.values()) < GRADIENT_TOLERANCE, errors


@pytest.mark.parametrize("provider", ["ligerprof", "torch"])
@sampled("family", FAMILIES, every=3)
def test_a_patched_model_trains_as_before_and_undo_leaves_no_trace(
    family: str, provider: str, device: torch.device
) -> None:
    model = tiny_model(family, device=device)
    before, expected = fingerprint(model), train_once(model)
    with apply(model, "all", provider=provider) as patch:
        assert fingerprint(model) != before
        assert_same_step(expected, train_once(model))
        assert patch.provider == provider
    assert fingerprint(model) == before
    assert train_once(model)[0] == expected[0]


@sampled("family", FAMILIES, every=4)
def test_each_kernel_alone_and_ce_in_place_of_flce(family: str, device: torch.device) -> None:
    model = tiny_model(family, device=device)
    expected = train_once(model)
    with apply(model, "all") as patch:
        names = patch.kernels
    for name in (*names[:-1], "ce"):
        with apply(model, name):
            assert_same_step(expected, train_once(model))


@pytest.mark.parametrize("kernels", ["rms+flce:torch", "rope:torch+rms:ligerprof+swiglu:torch+flce"])
def test_a_provider_per_kernel(kernels: str, device: torch.device) -> None:
    model = tiny_model("llama", device=device)
    before, expected = fingerprint(model), train_once(model)
    with apply(model, kernels) as patch:
        assert_same_step(expected, train_once(model))
        assert set(patch.provider.split("+")) == {"ligerprof", "torch"}
    assert fingerprint(model) == before


def test_kernels_can_be_put_in_one_after_the_other(device: torch.device) -> None:
    model = tiny_model("llama", device=device)
    before, expected = fingerprint(model), train_once(model)
    first, second = apply(model, "rms"), apply(model, "flce+swiglu")
    assert_same_step(expected, train_once(model))
    second.undo()
    first.undo()
    first.undo()
    assert fingerprint(model) == before


def test_patches_of_the_same_modules_are_undone_from_the_last_one() -> None:
    model = tiny_model("llama")
    before, expected = fingerprint(model), train_once(model)
    first, second = apply(model, "all", provider="torch"), apply(model, "all", provider="torch")
    for _ in range(2):
        with pytest.raises(KernelInputError, match="Undo the later patch first"):
            first.undo()
    assert_same_step(expected, train_once(model))
    second.undo()
    first.undo()
    assert fingerprint(model) == before


def test_a_subclass_without_types_returns_the_output_of_its_base() -> None:
    from transformers import LlamaForCausalLM

    class Own(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            return super().forward(*args, **kwargs)

    model = Own(tiny_model("llama").config)
    with apply(model, "flce", provider="torch"):
        assert type(model(**batch(model))) is CausalLMOutputWithPast


@pytest.mark.parametrize(("family", "reentrant"), [("llama", True), ("qwen3", False)], ids=str)
def test_gradient_checkpointing_recomputes_through_the_kernels(
    family: str, reentrant: bool, device: torch.device
) -> None:
    model = tiny_model(family, device=device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    expected = train_once(model)
    with apply(model, "all"):
        assert_same_step(expected, train_once(model))


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        # separate projections, normalized queries and keys before and after they are reshaped, one projection for all
        *((family, "rope") for family in ("llama", "qwen3", "olmo2", "phi3")),
        *((family, "all") for family in ("llama", "phi3")),
    ],
)
def test_queries_and_keys_that_share_no_memory_are_rotated_in_place(
    family: str, kernels: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ligerprof.kernels.rope import triton as rope

    where, rotate = [], rope._rotate

    def watched(q: torch.Tensor, *given: torch.Tensor, **options: bool) -> Any:
        outputs = rotate(q, *given, **options)
        where.append((bool(options.get("backward")), outputs[0].data_ptr() == q.data_ptr()))
        return outputs

    monkeypatch.setattr(rope, "_rotate", watched)
    model = tiny_model(family, device=device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with apply(model, kernels):
        train_once(model)
    forward, backward = (False, len(ARCHITECTURES[family].attention.qkv) == 3), (True, False)
    # two layers forward, then each again and backward
    assert where == [forward, forward, *2 * [forward, backward]]


@pytest.mark.parametrize("kernels", ["flce", "ce"])
def test_training_returns_no_logits_and_evaluation_does(kernels: str, device: torch.device) -> None:
    model = tiny_model("gemma2", device=device)
    given = batch(model)
    with torch.no_grad():
        expected = model.eval()(**given)
    with apply(model, kernels), torch.no_grad():
        evaluated = model(**given)
        skipped = model(**given, skip_logits=True)
        trained = model.train()(**given)
        asked_for = model(**given, skip_logits=False)
        unlabelled = model(input_ids=given["input_ids"])
    assert torch.equal(evaluated.logits, expected.logits)
    assert torch.equal(asked_for.logits, expected.logits)
    assert torch.equal(unlabelled.logits, expected.logits)
    assert evaluated.loss == expected.loss
    assert skipped.logits is None
    assert trained.logits is None
    for output in (skipped, trained):
        assert output.loss.item() == pytest.approx(expected.loss.item(), rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("kernels", ["flce", "ce"])
def test_arguments_of_the_loss_reach_the_kernel(kernels: str, device: torch.device) -> None:
    model = tiny_model("llama", device=device)
    labels = batch(model)["labels"]
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    arguments: list[dict[str, Any]] = [
        {"num_items_in_batch": torch.tensor(31, device=device)},
        {"num_items_in_batch": 31},
        {"shift_labels": shifted},
        {"shift_labels": shifted[:, -4:].contiguous(), "labels": labels[:, -4:], "logits_to_keep": 4},
        {"shift_labels": shifted[:, [1, 5]], "labels": labels[:, [1, 5]], "logits_to_keep": torch.tensor([1, 5])},
        {"ignore_index": int(labels[1, 4]), "labels": batch(model)["input_ids"]},
    ]
    for more in arguments:
        expected = train_once(model, **more)
        with apply(model, kernels):
            assert_same_step(expected, train_once(model, **more))


def test_tuples_positions_and_hidden_states_come_back_as_before(device: torch.device) -> None:
    model = tiny_model("llama", device=device)
    given = batch(model)
    expected = model(**given, output_hidden_states=True)
    with apply(model, "flce,rope"):
        output = model(**given, output_hidden_states=True)
        loss, *rest = model(given["input_ids"], labels=given["labels"], return_dict=False)
        parameters = inspect.signature(model.forward).parameters
    assert len(output.hidden_states) == len(expected.hidden_states)
    assert relative_error(output.hidden_states[-1], expected.hidden_states[-1]) < LOSS_TOLERANCE
    assert loss.item() == pytest.approx(expected.loss.item(), rel=LOSS_TOLERANCE)
    assert not rest
    # the Trainer drops columns and decides on num_items_in_batch by the signature
    assert list(parameters) == list(inspect.signature(model.forward).parameters)


def test_labels_that_do_not_fit_the_kept_positions_are_refused(device: torch.device) -> None:
    model = tiny_model("llama", device=device)
    with apply(model, "flce"), pytest.raises(KernelInputError, match="do not match"):
        model(**batch(model), logits_to_keep=4)


def test_the_fused_loss_runs_inside_the_heads_own_call(device: torch.device) -> None:
    """Hooks that gather a sharded weight fire before the kernel reads it."""
    model, seen = tiny_model("llama", device=device), []
    handles = [
        model.lm_head.register_forward_pre_hook(lambda *_: seen.append("before")),
        model.lm_head.register_forward_hook(lambda *_: seen.append("after")),
    ]
    with apply(model, "flce"):
        train_once(model)
    assert seen == ["before", "after"]
    for handle in handles:
        handle.remove()


def test_a_class_is_patched_for_its_new_instances(device: torch.device) -> None:
    from transformers import LlamaForCausalLM

    expected = train_once(tiny_model("llama", device=device))
    before = fingerprint(tiny_model("llama"))
    with apply(LlamaForCausalLM, "all", device_kind=device.type):
        patched = tiny_model("llama", device=device)
        assert type(patched) is not LlamaForCausalLM
        assert isinstance(patched, LlamaForCausalLM)
        assert_same_step(expected, train_once(patched))
    assert type(patched) is LlamaForCausalLM
    plain = [entry[:2] for entry in before]
    assert [entry[:2] for entry in fingerprint(tiny_model("llama"))] == plain
    assert type(tiny_model("llama")) is LlamaForCausalLM


def test_a_deep_copy_works_on_its_own_weights(device: torch.device) -> None:
    model = tiny_model("llama", device=device)
    with apply(model, "all"):
        twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert train_once(twin)[0] > 0
    assert train_once(twin)[0] != train_once(model)[0]


def test_a_patched_model_is_freed_without_the_garbage_collector() -> None:
    model = tiny_model("llama")
    gc.collect()
    apply(model, "all", device_kind="simulated")
    gone = weakref.ref(model.model.layers[0].mlp)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_patched_model_compiles_without_a_graph_break() -> None:
    """The patches themselves: Triton kernels are traced on a GPU only."""
    model = tiny_model("llama")
    loss, _ = train_once(model)
    with apply(model, "all", provider="torch"):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert compiled(**batch(model)).loss.item() == pytest.approx(loss, rel=LOSS_TOLERANCE)


def test_inside_peft(device: torch.device) -> None:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("llama", device=device), config)
    expected = train_once(model)
    with apply(model, "all") as patch:
        assert_same_step(expected, train_once(model))
        assert patch.notes() == (
            "swiglu: 2 of 2 MLPs keep their product for backward, since it goes into peft.tuners.lora.layer.Linear",
        )
    assert all("lora" in name for name in expected[1])


def test_adapters_that_come_after_the_kernels_are_trained_too(device: torch.device) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["gate_proj", "down_proj"], init_lora_weights=False)
    plain, patched = tiny_model("llama", device=device), tiny_model("llama", device=device)
    torch.manual_seed(1)
    expected = train_once(peft.get_peft_model(plain, config))
    patch = apply(patched, "no-flce")
    assert patch.notes() == ()
    torch.manual_seed(1)
    assert_same_step(expected, train_once(peft.get_peft_model(patched, config)))
    assert len(patch.notes()) == 1


def test_what_joins_layers_runs_inside_the_calls_whose_weights_it_reads(device: torch.device) -> None:
    """Hooks that gather a sharded weight fire before the kernel reads it."""
    model, seen = tiny_model("llama", device=device, num_hidden_layers=1), []
    layer = model.model.layers[0]
    for name, module in (("norm", layer.post_attention_layernorm), ("down", layer.mlp.down_proj)):
        module.register_forward_pre_hook(lambda _module, args, name=name: seen.append((name, len(args))))
    with apply(model, "rms+swiglu"):
        train_once(model)
    assert seen == [("norm", 2), ("down", 2)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_layer_adds_and_normalizes_in_one_call(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ligerprof.kernels.norm import triton as norm

    calls: list[str] = []
    for name in ("rms_norm", "add_rms_norm"):
        kernel = getattr(norm, name)
        monkeypatch.setattr(norm, name, lambda *a, name=name, kernel=kernel: calls.append(name) or kernel(*a))
    model = tiny_model(family)
    layers = len(model.model.layers)
    with apply(model, "rms"):
        train_once(model)
    assert calls.count("add_rms_norm") == layers


def test_layers_that_a_kernel_leaves_out_are_reported() -> None:
    with apply(every_tiny_model("gemma3n_text"), "all", provider="torch") as patch:
        assert patch.notes() == (
            "rms: 4 of 50 norms have no weight and run without the kernel",
            "geglu: 1 of 5 MLPs have a sparse activation and run without the kernel",
        )


def test_a_head_wrapped_later_is_noticed(device: torch.device) -> None:
    model = tiny_model("mistral", device=device)
    with apply(model, "flce"):
        model.set_output_embeddings(nn.Linear(48, VOCAB, bias=False, device=device))
        with pytest.raises(KernelInputError, match=r"became a torch\.nn\.modules\.linear\.Linear after"):
            train_once(model)


def test_simulated_kernels_are_judged_for_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny_model("llama")
    with pytest.raises(KernelUnavailableError, match=r"kernel rope of ligerprof: .*TRITON_INTERPRET=1"):
        apply(model, "all")
    with apply(model, "all", device_kind="simulated") as patch:
        assert isinstance(patch, Patch)


def test_a_simulated_gpu_decides_the_sm_count() -> None:
    from ligerprof.kernels.device import sm_count

    here = torch.device("cpu")
    plain = sm_count(here)
    with simulated_device(sm_count=77), simulated_device(sm_count=132):
        assert sm_count(here) == 132
    assert sm_count(here) == plain


@pytest.mark.parametrize("kernels", ["flce", "ce"])
def test_a_model_without_a_head_is_refused(kernels: str) -> None:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_config(tiny_config("llama"))
    with pytest.raises(KernelInputError, match="has no output layer over the vocabulary"):
        apply(model, kernels)
    apply(model, "rms").undo()


def test_what_cannot_be_patched_is_refused_and_left_alone(device: torch.device) -> None:
    model = tiny_model("llama", device=device)
    before = fingerprint(model)
    with pytest.raises(RecipeError, match="unknown kernel"):
        apply(model, "attention")
    with pytest.raises(RecipeError, match="no operation that geglu replaces"):
        apply(model, "geglu")
    with pytest.raises(KernelInputError, match="not a causal language model"):
        apply(nn.Linear(2, 2), "rms")
    with pytest.raises(KernelUnavailableError, match="no kernel 'flce'"):
        apply(model, "flce", provider="unknown")
    assert fingerprint(model) == before
    model.model.norm.forward = model.model.norm.forward
    with pytest.raises(KernelInputError, match="has a forward of its own"):
        apply(model, "swiglu+rms")
    del model.model.norm.forward
    assert fingerprint(model) == before


def test_another_activation_and_another_architecture_are_refused() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = tiny_config("gemma")
    config.hidden_act = "gelu"
    with pytest.raises(KernelUnavailableError, match="the model's MLP uses GELUActivation"):
        apply(AutoModelForCausalLM.from_config(config), "geglu", device_kind="simulated")
    opt = AutoConfig.for_model(
        "opt", hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=99
    )
    with pytest.raises(KernelUnavailableError, match="models of type 'opt' cannot be patched"):
        apply(AutoModelForCausalLM.from_config(opt), "flce", device_kind="simulated")


def test_a_change_on_top_of_a_patch_is_not_undone_blindly(device: torch.device) -> None:
    model = tiny_model("llama", device=device)
    patch = apply(model, "flce")
    ours = type(model.lm_head)
    model.lm_head.__class__ = type("Sharded", (ours,), {})
    with pytest.raises(KernelInputError, match="was changed to Sharded"):
        patch.undo()


def test_a_kernel_needs_the_device_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelUnavailableError, match="no CUDA device is visible"):
        require_available(find_kernel("flce"), "cuda")


def test_hooks_see_the_values_of_a_model_without_kernels(device: torch.device) -> None:
    """Outputs and gradients of every block and norm, by hooks that copy them."""
    seen: list[dict[str, torch.Tensor]] = [{}, {}]
    for found, kernels in zip(seen, ("none", "all"), strict=True):
        model = tiny_model("llama", device=device)
        for name, module in model.named_modules():
            if name.endswith(("mlp", "self_attn", "norm", "q_proj", "gate_proj", "down_proj")):

                def forward_hook(
                    _module: nn.Module, _inputs: Any, output: Any, name: str = name, found: Any = found
                ) -> None:
                    output = output[0] if isinstance(output, tuple) else output
                    found[name] = output.detach().clone()
                    output.register_hook(lambda grad: found.update({f"{name}.grad": grad.clone()}))

                module.register_forward_hook(forward_hook)
        if kernels != "none":
            apply(model, kernels)
        train_once(model)
    plain, fused = seen
    assert set(plain) == set(fused)
    assert len(plain) > 20
    for name, right in plain.items():
        assert relative_error(fused[name], right) < 1e-5, name
