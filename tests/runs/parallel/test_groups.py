from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.parallel import module_groups
from ligerprof.runs.training import built_model

MODELS = ("tiny", "llama3.2-1b", "llama3.1-8b", "gemma2-2b", "gpt2-xl", "qwen3-0.6b")
Call = tuple[list[str], bool | None]


def recipe(model: str, **options: Any) -> TrainingRecipe:
    return TrainingRecipe(model=model, engine="fsdp2", gpus=2, precision="mixed", attention="eager", **options)


def on_meta(given: TrainingRecipe) -> Any:
    return built_model(given, torch.device("cpu"), on_meta=True)


def parameters_of(modules: tuple[nn.Module, ...]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters()}


@pytest.mark.parametrize("wrap", ["layers", "accelerate"])
@pytest.mark.parametrize(("model", "lora"), [("tiny", None), ("tiny", 8), ("gpt2-xl", None), ("llama3.1-8b", None)])
def test_groups_hold_every_parameter_once_and_layers_alone(model: str, wrap: str, lora: int | None) -> None:
    given = recipe(model, wrap=wrap, lora=lora)
    with on_meta(given) as built:
        seen: set[nn.Parameter] = set()
        for group in module_groups(built, given):
            # a group takes what no earlier group has
            seen |= parameters_of(group.modules)
        assert seen == set(built.parameters())
        groups = module_groups(built, given)
        inner: Any = built.get_base_model() if hasattr(built, "get_base_model") else built
        layers = list(inner.get_submodule(given.spec.architecture.layers))
        assert [group.modules for group in groups[: len(layers)]] == [(layer,) for layer in layers]
        assert groups[-1].modules == (built,)


def accelerate_calls(built: Any, reshard: bool, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What accelerate passes to fully_shard for a model."""
    import torch.distributed.fsdp
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    names = {module: name for name, module in built.named_modules()}
    calls: list[Call] = []

    def fully_shard(modules: Any, **options: Any) -> None:
        listed = modules if isinstance(modules, list) else [modules]
        calls.append(([names[module] for module in listed], options.get("reshard_after_forward")))

    monkeypatch.setattr(torch.distributed.fsdp, "fully_shard", fully_shard)
    plugin = SimpleNamespace(
        set_auto_wrap_policy=lambda _model: None,
        auto_wrap_policy=transformer_auto_wrap_policy,
        transformer_cls_names_to_wrap=None,
        reshard_after_forward=reshard,
        cpu_offload=OffloadPolicy(),
        mixed_precision_policy=MixedPrecisionPolicy(),
        ignored_modules=None,
        cpu_ram_efficient_loading=False,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", torch_device_mesh=None, is_main_process=True
    )
    fsdp_utils.fsdp2_prepare_model(accelerator, built)
    return calls


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("reshard", [True, False])
def test_wrap_accelerate_groups_as_accelerate_does(model: str, reshard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", minversion="1.15")
    given = recipe(model, wrap="accelerate", reshard=reshard)
    with on_meta(given) as built:
        names = {module: name for name, module in built.named_modules()}
        ours = [([names[one] for one in group.modules], group.reshard) for group in module_groups(built, given)]
        # the order of the groups makes no difference to what each holds
        key: Callable[[Call], list[str]] = lambda call: call[0]  # noqa: E731
        assert sorted(ours, key=key) == sorted(accelerate_calls(built, reshard, monkeypatch), key=key)
