"""Train a recipe's model under DDP or FSDP, torch's own engines; the same code runs on GPUs and simulated."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ligerprof.kernels.device import is_simulated
from ligerprof.recipe.categories import BackwardPrefetch as Prefetch
from ligerprof.recipe.categories import Engine, GradSync, Offload, Wrap
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.activation_offload import checkpointed_layers
from ligerprof.runs.training import Trainer, built_model, load_model, make_optimizer, make_scaler


def join_process_group(recipe: TrainingRecipe, device: torch.device) -> None:
    """Initialize torch.distributed unless the process did: NCCL for a GPU, gloo for the CPU.

    NCCL connects the ranks at once, so that its memory is taken before the model's.
    """
    from torch import distributed

    if distributed.is_initialized():
        return
    if device.type == "cpu":
        distributed.init_process_group("gloo")
        return
    # the norm of offloaded gradients is summed in main memory
    backend = "nccl" if recipe.offload is Offload.NONE else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, device_id=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """Modules that one call of fully_shard takes.

    Attributes:
        reshard: reshard_after_forward; None is torch's default, which keeps the root gathered.
    """

    modules: tuple[nn.Module, ...]
    reshard: bool | None


def module_groups(model: nn.Module, recipe: TrainingRecipe) -> tuple[RankGroup, ...]:
    """The groups of a recipe's model in the order in which they are sharded, the model itself last."""
    layers = [RankGroup(modules=(layer,), reshard=recipe.reshard) for layer in checkpointed_layers(model)]
    if recipe.wrap is Wrap.LAYERS:
        return (*layers, RankGroup(modules=(model,), reshard=recipe.reshard))
    return (*layers, *_accelerate_groups(model, recipe), RankGroup(modules=(model,), reshard=None))


def _accelerate_groups(model: Any, recipe: TrainingRecipe) -> Iterator[RankGroup]:
    """The embedding, and the final norm with the head; a tied embedding is in the second group.

    As in fsdp2_prepare_model of accelerate 1.15 (accelerate/utils/fsdp_utils.py).
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding.weight is head.weight
    if not tied:
        yield RankGroup(modules=(embedding,), reshard=recipe.reshard)
    tail = (_final_norm(model), embedding if tied else None, head)
    yield RankGroup(modules=tuple(module for module in tail if module is not None), reshard=False)


def _final_norm(model: Any) -> nn.Module | None:
    """The last direct child of the base model with `Norm` in its class name."""
    base = getattr(model, model.base_model_prefix, None) if model.base_model_prefix else model
    if not isinstance(base, nn.Module):
        return None
    norms = [module for module in base.children() if "Norm" in type(module).__name__]
    return norms[-1] if norms else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicatedTrainer(Trainer):
    """Training under DDP."""

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Reduce gradients in this micro-batch, or only accumulate them, as `no_sync` does."""
        model: Any = self.model
        model.require_backward_grad_sync = is_last or self.recipe.grad_sync is GradSync.EVERY


def _under_ddp(recipe: TrainingRecipe, model: nn.Module, device: torch.device) -> ReplicatedTrainer:
    replica = nn.parallel.DistributedDataParallel(
        model, device_ids=None if device.type == "cpu" else [device.index], gradient_as_bucket_view=recipe.bucket_view
    )
    return ReplicatedTrainer(
        recipe=recipe,
        model=replica,
        optimizer=make_optimizer(recipe, model),
        scaler=make_scaler(recipe, device.type),
        device_type=device.type,
    )


_SHARD = "shard"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedTrainer(Trainer):
    """Training under FSDP2."""

    @property
    def ranks_differ(self) -> bool:
        """Whether shards are uneven."""
        parameters = (each for each in self.model.parameters() if isinstance(each, DTensor))
        return any(each.shape[0] % each.device_mesh.size(-1) != 0 for each in parameters)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Reduce gradients in this micro-batch, or keep them unsharded until a later one."""
        model: Any = self.model
        model.set_requires_gradient_sync(is_last or self.recipe.grad_sync is GradSync.EVERY)


def _under_fsdp2(recipe: TrainingRecipe, model: nn.Module, device: torch.device) -> ShardedTrainer:
    shard(model, recipe, make_mesh(recipe, device.type))
    _fill_shards(model, recipe, device)
    optimizer = make_optimizer(recipe, model)
    return ShardedTrainer(recipe=recipe, model=model, optimizer=optimizer, scaler=None, device_type=device.type)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatTrainer(Trainer):
    """Training under FSDP1."""

    @property
    def ranks_differ(self) -> bool:
        """True: the equal parts of flat parameters hold other parameters on each rank."""
        return True

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Reduce gradients in this micro-batch, or keep them whole, as `no_sync` does."""
        units: list[Any] = FullyShardedDataParallel.fsdp_modules(self.model)
        for unit in units:
            unit._sync_gradients = is_last or self.recipe.grad_sync is GradSync.EVERY

    def clip_gradients(self, largest: float) -> None:
        """Scale the gradients by their norm over all ranks."""
        model: Any = self.model
        model.clip_grad_norm_(largest)


def _under_fsdp1(recipe: TrainingRecipe, model: nn.Module, device: torch.device) -> FlatTrainer:
    from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import CustomPolicy

    policy = MixedPrecision(
        param_dtype=getattr(torch, recipe.gathered_dtype), reduce_dtype=getattr(torch, recipe.reduction_dtype)
    )
    is_plain = recipe.gathered_dtype == recipe.weight_dtype == recipe.reduction_dtype
    layers, prefetch = set(checkpointed_layers(model)), recipe.backward_prefetch
    flat = FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: module in layers),
        sharding_strategy=ShardingStrategy.FULL_SHARD if recipe.reshard else ShardingStrategy.SHARD_GRAD_OP,
        mixed_precision=None if is_plain else policy,
        backward_prefetch=None if prefetch is Prefetch.NONE else BackwardPrefetch[f"BACKWARD_{prefetch.upper()}"],
        param_init_fn=_materializer(model, recipe, device),
        device_id=device,
        use_orig_params=True,
    )
    optimizer = make_optimizer(recipe, flat)
    return FlatTrainer(recipe=recipe, model=flat, optimizer=optimizer, scaler=None, device_type=device.type)


def _materializer(model: Any, recipe: TrainingRecipe, device: torch.device) -> Callable[[nn.Module], None]:
    """What allocates a module of the meta device and loads or initializes it; tied weights stay one tensor."""
    owners = dict(_with_owners(model, model))
    names = {module: name for name, module in model.named_modules()}
    reads = recipe.spec.weights_path is not None and not is_simulated()
    source = dict(load_model(recipe, torch.device("cpu")).named_parameters()) if reads else {}
    made: dict[nn.Parameter, nn.Parameter] = {}

    @torch.no_grad()
    def materialize(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device))
            module._parameters[name] = made[parameter]
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
        owners[module]._init_weights(module)
        for name, parameter in module.named_parameters(recurse=False):
            if (whole := source.get(f"{names[module]}.{name}")) is not None:
                parameter.copy_(whole)

    return materialize


def make_mesh(recipe: TrainingRecipe, device_type: str) -> DeviceMesh:
    """The mesh over all ranks: the shards, or replicas times shards."""
    sizes = (recipe.shards,) if recipe.replicate == 1 else (recipe.replicate, recipe.shards)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", _SHARD)[-len(sizes) :])


def shard(model: nn.Module, recipe: TrainingRecipe, mesh: DeviceMesh) -> None:
    """Apply fully_shard to the recipe's groups."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    dtypes = {}
    if recipe.gathered_dtype != recipe.weight_dtype:
        dtypes["param_dtype"] = getattr(torch, recipe.gathered_dtype)
    if recipe.reduction_dtype != recipe.gathered_dtype:
        dtypes["reduce_dtype"] = getattr(torch, recipe.reduction_dtype)
    # page-locked memory needs a GPU
    moving = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(**dtypes),
        "offload_policy": moving if recipe.offload is Offload.ALL else OffloadPolicy(),
    }
    for group in module_groups(model, recipe):
        fully_shard(list(group.modules), mesh=mesh, reshard_after_forward=group.reshard, **options)


def _fill_shards(model: Any, recipe: TrainingRecipe, device: torch.device) -> None:
    """Allocate this rank's shards of a model on the meta device, and load or initialize them.

    Random weights differ from those of an unsharded model: each rank draws its own shards.
    """
    offloads = recipe.offload is not Offload.NONE
    model.to_empty(device="cpu" if offloads else device)
    mesh = next(parameter.device_mesh for parameter in model.parameters() if hasattr(parameter, "device_mesh"))
    with _local_parameters(model), _copying_parts(mesh), torch.no_grad():
        _initialize(model)
    if recipe.spec.weights_path is not None and not is_simulated():
        _load(model, recipe)
    if offloads:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))


@contextmanager
def _local_parameters(model: nn.Module) -> Iterator[None]:
    """Put this rank's shards in place of the distributed parameters, so that no operation communicates."""
    local: dict[nn.Parameter, nn.Parameter] = {}
    with ExitStack() as stack:
        for module in model.modules():
            own = dict(module.named_parameters(recurse=False))
            for parameter in own.values():
                part: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.setdefault(parameter, nn.Parameter(part.detach(), requires_grad=False))
            replaced = {name: local[parameter] for name, parameter in own.items()}
            stack.enter_context(mock.patch.dict(module._parameters, replaced))
        yield


@contextmanager
def _copying_parts(mesh: DeviceMesh) -> Iterator[None]:
    """Let transformers copy this rank's part where it initializes a shard by a whole value, such as Mamba-2's rates."""
    from transformers import initialization

    copy: Any = initialization.copy_

    def copy_part(tensor: Tensor, other: Tensor) -> Tensor:
        copied: Tensor = copy(tensor, other if tensor.shape == other.shape else _part(mesh, other))
        return copied

    with mock.patch.object(initialization, "copy_", copy_part):
        yield


def _initialize(model: Any) -> None:
    """Initialize weights and buffers with the functions of transformers and peft."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for module, owner in _with_owners(model, inner):
        padding = getattr(module, "padding_idx", None)
        if isinstance(module, nn.Embedding):
            # its row may be in another rank's shard
            module.padding_idx = None
        owner._init_weights(module)
        if isinstance(module, nn.Embedding):
            module.padding_idx = padding
        for adapter in getattr(module, "lora_A", {}):
            module.reset_lora_parameters(adapter, init_lora_weights=True)


def _with_owners(module: Any, owner: Any) -> Iterator[tuple[Any, Any]]:
    """Modules, each with the innermost model of transformers around it, which knows how to initialize it."""
    from transformers import PreTrainedModel

    innermost = module if isinstance(module, PreTrainedModel) else owner
    yield module, innermost
    for child in module.children():
        yield from _with_owners(child, innermost)


def _load(model: Any, recipe: TrainingRecipe) -> None:
    """Copy this rank's parts of the weights in the recipe's folder into the shards."""
    source = dict(load_model(recipe, torch.device("cpu")).named_parameters())
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            # peft wraps the layers that it adapts
            if (whole := source.get(name.replace(".base_layer", ""))) is not None:
                parameter.to_local().copy_(_part(parameter.device_mesh, whole))


def _part(mesh: DeviceMesh, whole: Tensor) -> Tensor:
    """The rows of a tensor that this rank holds; none if there are fewer rows than ranks."""
    parts, place = whole.chunk(mesh.size(mesh.ndim - 1)), mesh.get_local_rank(_SHARD)
    return parts[place] if place < len(parts) else whole[:0]


@contextmanager
def _trained(
    recipe: TrainingRecipe, device: torch.device, see_model: Callable[[nn.Module], None], *, engine: Engine
) -> Iterator[Trainer]:
    """Build the training under an engine, as the rank that the environment variables give; raises as `built_model`.

    Args:
        device: this rank's GPU; the CPU trains over gloo.
        see_model: called with the model before the engine hooks it.
    """
    join_process_group(recipe, device)
    with built_model(recipe, device, on_meta=engine is not Engine.DDP) as model:
        see_model(model)
        yield _UNDER[engine](recipe, model, device)


_UNDER: Mapping[Engine, Callable[[TrainingRecipe, nn.Module, torch.device], Trainer]] = {
    Engine.DDP: _under_ddp,
    Engine.FSDP1: _under_fsdp1,
    Engine.FSDP2: _under_fsdp2,
}
# what builds the training under each of torch's engines, after `join_process_group`
TRAINERS: Mapping[Engine, Callable[..., AbstractContextManager[Trainer]]] = {
    engine: partial(_trained, engine=engine) for engine in _UNDER
}
