"""What autograd saves is kept in main memory, as TRL's and torchtune's OffloadActivations do, or computed again.

The references that keep GPU memory alive are those of trl/models/activation_offloading.py; see
ligerprof/torch_memory/saved_tensors.py.
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ligerprof.errors import RecipeError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.torch_memory.saved_tensors import SMALLEST_BYTES, STASH_LENGTH, SavePolicy, Selection, pinned_bytes

# size, strides and offset of a tensor on its storage
_View = tuple[tuple[int, ...], tuple[int, ...], int]


class ActivationOffload(saved_tensors_hooks):
    """Hooks around the forward and the backward pass of a micro-batch.

    Args:
        model: its parameters are not moved, and neither is what its output head saves.

    Attributes:
        host_bytes: the most main memory that the copies of one micro-batch took.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._pack, self._unpack)
        # page-locked memory is copied to and from on a stream of its own
        self._compute, self._copies = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._parameters = {_storage(parameter) for parameter in model.parameters()}
        self.host_bytes = 0
        self._clear()
        _leave_out(model.get_output_embeddings())  # type: ignore[operator]

    def __enter__(self) -> None:
        self._clear()
        super().__enter__()

    def __exit__(self, *args: object) -> None:
        try:
            self._compute.synchronize()
            self._copies.synchronize()
            self._clear()
        finally:
            super().__exit__(*args)

    def _clear(self) -> None:
        # saved tensors by number: the tensor itself if it stays on the GPU, else its copy in main memory and its view
        self._packed: dict[int, Tensor | tuple[Tensor, _View]] = {}
        self._number = 0
        self._copied_bytes = 0
        # originals whose copies may not be made yet, by number, each with its key
        self._originals: dict[int, tuple[Tensor, Any, Any]] = {}
        self._keys: dict[Any, int] = {}
        # loaded tensors, by number
        self._loaded: dict[int, Tensor] = {}
        self._node: Any = None

    def _pack(self, tensor: Tensor) -> int:
        self._number += 1
        number, key = self._number, (_storage(tensor), tensor.storage_offset(), tensor.dtype)
        stays = (
            key in self._keys
            or tensor.numel() * tensor.element_size() < SMALLEST_BYTES
            or isinstance(tensor, nn.Parameter)
            or _storage(tensor) in self._parameters
        )
        if stays:
            self._packed[number] = tensor
            return number
        for older in [other for other in self._originals if other <= number - STASH_LENGTH]:
            self._release_original(older)
        flat, view = _storable(tensor)
        self._copies.wait_stream(self._compute)
        with torch.cuda.stream(self._copies):
            copy = torch.empty_like(flat, device="cpu", pin_memory=True)
            copy.copy_(flat, non_blocking=True)
        self._copied_bytes += pinned_bytes(flat.numel() * flat.element_size())
        self.host_bytes = max(self.host_bytes, self._copied_bytes)
        self._packed[number] = copy, view
        self._originals[number] = (flat, self._copies.record_event(), key)
        self._keys[key] = number
        return number

    def _release_original(self, number: int) -> None:
        _, copying, key = self._originals[number]
        self._compute.wait_event(copying)
        del self._originals[number]
        if self._keys.get(key) == number:
            del self._keys[key]

    def _unpack(self, number: int) -> Tensor:
        packed = self._packed.pop(number)
        if isinstance(packed, Tensor):
            return packed
        copy, view = packed
        node, earlier = torch._C._current_autograd_node(), []
        if node != self._node:
            self._node, earlier = node, list(self._loaded)
        if number in self._originals:
            tensor, references = self._originals[number][0], None
        else:
            with torch.cuda.stream(self._copies):
                tensor = copy.to("cuda", non_blocking=True)
            self._compute.wait_stream(self._copies)
            if (tensor.shape, tensor.stride()) != view[:2]:
                tensor = torch.as_strided(tensor, *view)
            self._loaded[number] = tensor
            references = _references(tensor)
        node.register_hook(self._after_node(number, references, earlier))
        return tensor

    def _after_node(self, number: int, references: int | None, earlier: list[int]) -> Callable[..., None]:
        """Release originals, and what nodes before this one had loaded."""

        def hook(_outputs: Any, _inputs: Any) -> None:
            # a view of the tensor is alive: the node's result, or saved by a recomputation
            if references is not None and number in self._loaded and _references(self._loaded[number]) > references:
                # its memory must not be used again before the computation so far has ended
                self._loaded.pop(number).record_stream(self._compute)
            for older in list(self._originals):
                self._release_original(older)
            for older in earlier:
                self._loaded.pop(older, None)

        return hook


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _references(tensor: Tensor) -> int:
    """Tensors on the same storage."""
    return int(torch._C._storage_Use_Count(_storage(tensor)))


def _storable(tensor: Tensor) -> tuple[Tensor, _View]:
    """A contiguous tensor to copy, and the view of it that gives the saved tensor back."""
    shape, strides, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    if 0 in strides:
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        return torch.as_strided(tensor, (elements,), (1,), 0), (shape, strides, offset)
    tensor = tensor.clone(memory_format=torch.contiguous_format) if offset else tensor.contiguous()
    return tensor, (shape, tensor.stride(), 0)


def _leave_out(head: nn.Module) -> None:
    """Keep on the GPU what a module saves: only the innermost hooks run."""
    identity = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    head.register_forward_pre_hook(lambda *_: identity.__enter__())
    head.register_forward_hook(lambda *_: identity.__exit__(), always_call=True)


def enable_checkpointing(model: Any, recipe: TrainingRecipe) -> None:
    """Checkpoint the recipe's decoder layers, each as the recipe says.

    Versions of transformers before 5.23 do not have `every_n_layers`, so the layers are switched off one by one.
    """
    settings = {"use_reentrant": recipe.reentrant}
    # transformers 5.2x renamed the method, and warns if the older name is called
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    for index, layer in enumerate(checkpointed_layers(model)):
        layer.gradient_checkpointing = recipe.checkpoints_layer(index)
        if (policy := recipe.policy_of_layer(index)) is not None:
            call = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = partial(call, context_fn=selective_contexts(policy))


def selective_contexts(policy: SavePolicy) -> Callable[[], Any]:
    """What torch.utils.checkpoint takes as `context_fn`.

    torch's own modes ask a policy about each operator of a region, which takes the host two to three times as long.

    Raises:
        RecipeError: torch does not have an operator.
    """
    operators = {_find_operator(name): name for name in policy.every}

    def contexts() -> Any:
        if torch._guards.TracingContext.try_get() is not None:
            # torch.compile's partitioner reads the marks that torch's modes leave
            return _torch_contexts(policy)
        keeping = _Keeping(policy, operators)
        return keeping, _Reusing(keeping.kept)

    return contexts


def _torch_contexts(policy: SavePolicy) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    # versions of torch before 2.13 ask again while they recompute
    passes = {False: Selection(policy), True: Selection(policy)}

    def choose(context: Any, operator: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
        kept = passes[context.is_recompute].keeps(str(operator), _factor(operator, args))
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)  # type: ignore[no-untyped-call]


def _factor(operator: Any, args: Any) -> Any:
    return tuple(args[1].shape) if operator is torch.ops.aten.mm.default else None


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoid a wrapper around each operator: compiled regions have torch's modes."""
        return False


class _Keeping(_Mode):
    """The first pass over a region.

    Attributes:
        kept: by operator, of each call its output with the versions of its tensors, or None if it is computed again.
    """

    def __init__(self, policy: SavePolicy, operators: Mapping[Any, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._selection, self._operators = Selection(policy), operators
        self.kept: dict[Any, list[Any]] = {operator: [] for operator in operators}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs) if kwargs else func(*args)
        if (name := self._operators.get(func)) is not None:
            keeps = self._selection.keeps(name, _factor(func, args))
            self.kept[func].append(tree_map(_kept, output) if keeps else None)
        return output


class _Reusing(_Mode):
    """A pass that computes a region again, but for what the first one kept."""

    def __init__(self, kept: Mapping[Any, list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __enter__(self) -> "_Reusing":
        self._next = {operator: iter(range(len(calls))) for operator, calls in self._kept.items()}
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (calls := self._kept.get(func)) is not None:
            number = next(self._next[func], None)
            if number is None:
                raise RuntimeError(f"{func} ran more often than in the forward pass: what runs must not change.")
            if calls[number] is not None:
                output, calls[number] = calls[number], _used
                return tree_map(lambda value: value(), output)
        return func(*args, **kwargs) if kwargs else func(*args)


def _kept(value: Any) -> Callable[[], Any]:
    """A function that returns the value, and raises if it has been written to since.

    Tensors are detached as torch/utils/checkpoint.py detaches them, so that views share their versions.
    """
    if not isinstance(value, Tensor):
        return lambda: value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: FBT003
        detached = value.detach()
    version = detached._version

    def reused() -> Tensor:
        if detached._version != version:
            raise RuntimeError("A tensor that selective checkpointing kept was written to. Leave its operator out.")
        return detached

    return reused


def _used() -> Any:
    raise RuntimeError("Selective checkpointing lets each region run backward once. Leave `retain_graph` out.")


def _find_operator(name: str) -> Any:
    try:
        return attrgetter(name)(torch.ops)
    except AttributeError:
        raise RecipeError(f"--selective: torch {torch.__version__} has no operator {name}. Correct its name.") from None


def checkpointed_layers(model: nn.Module) -> list[Any]:
    """The layers that gradient checkpointing runs again, in the order of the model's modules."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
