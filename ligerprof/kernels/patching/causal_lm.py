"""A causal language model's forward with a fused loss, for every architecture.

peft wraps a head in `ModulesToSaveWrapper`, which calls a trained copy, or in LoRA's `Linear`, which adds a product of
two thin matrices. peft may come before the kernels or after them.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ligerprof.errors import KernelInputError
from ligerprof.kernels.linear_cross_entropy.plan import plan_chunks
from ligerprof.kernels.options import IGNORE_INDEX, LossOptions, LossRequest
from ligerprof.kernels.patching.patcher import Forward, Swapper
from ligerprof.kernels.spec import KernelShape, KernelSpec
from ligerprof.kernels.tensors import product_dtype
from ligerprof.models.architecture import Architecture
from ligerprof.units import MIB

# after these calls a whole step has passed and the optimizer's states exist, so that the peak is that of a step
_WARM_UP_CALLS = 2
# the allocator may return blocks up to 1 MiB larger than requested without splitting them
_MARGIN_BYTES = 8 * MIB


class MeasuredBudget:
    """The room between the memory allocated when the loss begins and the peak so far.

    The first calls are `lean`. The budget never grows afterwards, so that the loss does not raise the peak and its
    chunks stay the same after some steps.
    """

    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        self._calls = 0
        self._highest_bytes = 0
        self._budget_bytes: int | None = None

    def next(self, hidden: "Tensor", weight: "Tensor", rank: int = 0) -> str | int:
        """The budget of a call on these CUDA tensors; `rank`: of the adapters on the head."""
        import torch

        self._highest_bytes = max(self._highest_bytes, torch.cuda.max_memory_allocated(hidden.device))
        self._calls += 1
        if self._calls <= _WARM_UP_CALLS:
            return "lean"
        room_bytes = self._highest_bytes - torch.cuda.memory_allocated(hidden.device) - _MARGIN_BYTES
        shape = _shape(hidden, weight, product_dtype(hidden).itemsize, rank)
        lean_bytes = plan_chunks(
            tokens=shape.tokens,
            hidden=shape.hidden,
            vocab=shape.vocab,
            element_bytes=shape.product_bytes,
            budget="lean",
            gradient_bytes=0 if rank or not shape.weight_requires_grad else shape.parameter_bytes,
        ).workspace_bytes
        assert self._spec.memory is not None, "plain torch has no workspace to size"
        memory = self._spec.memory(shape)
        forward_bytes = memory.output_bytes + memory.saved_bytes + memory.forward_gradient_bytes
        # gradients, losses and casts take part of the room
        left_bytes = room_bytes - (forward_bytes + memory.forward_temporary_bytes - lean_bytes)
        if self._budget_bytes is not None:
            left_bytes = min(left_bytes, self._budget_bytes)
        self._budget_bytes = left_bytes
        return left_bytes if left_bytes > lean_bytes else "lean"


def _shape(hidden: "Tensor", weight: "Tensor", product_bytes: int, rank: int) -> KernelShape:
    """The call's shape; sizes that the fused loss's memory does not depend on are 1."""
    vocab, width = weight.shape
    return KernelShape(
        tokens=hidden.numel() // width,
        sequences=hidden.shape[0],
        hidden=width,
        intermediate=1,
        vocab=vocab,
        heads=1,
        kv_heads=1,
        head_dim=1,
        activation_bytes=hidden.element_size(),
        parameter_bytes=weight.element_size(),
        compute_bytes=product_bytes,
        weight_requires_grad=weight.requires_grad,
        low_rank=rank,
        flce_budget="lean",
    )


Kernel = Callable[..., Tensor]
_SLOT = "flce"


class FusedHead:
    """The head of a model, whose layers compute the loss if they receive a request."""

    def __init__(self, swapper: Swapper, kernel: Kernel, budget: MeasuredBudget | None) -> None:
        self._swapper, self._kernel, self._budget = swapper, kernel, budget

    def fuse(self, head: nn.Module) -> None:
        """Give each layer of a head a forward that computes the loss.

        Raises:
            KernelInputError: a layer's forward is not known.
        """
        for layer in _layers(head):
            if not _computes_loss(layer):
                self._swap(layer)

    def run(self, model: Any, hidden: Tensor, request: LossRequest) -> Tensor:
        """Compute the loss in the call of the model's head, after hooks that gather its weight.

        Raises:
            KernelInputError: the head was replaced after the kernels were put in.
        """
        head = model.get_output_embeddings()
        layers = _layers(head)
        if not all(map(_computes_loss, layers)):
            if not any(map(_computes_loss, layers)):
                raise KernelInputError(
                    f"flce: the model's head became a {_type_name(head)} after the kernels were put in."
                    " Resize or wrap it first, or use ce."
                )
            # peft has wrapped the head since
            self.fuse(head)
        loss: Tensor = head(hidden, loss=request)
        return loss

    def _swap(self, layer: nn.Module) -> None:
        if _is_plain(layer):
            self._swapper.swap(layer, _SLOT, lambda original: plain_forward(original, self._kernel, self._budget))
        elif _is_lora(layer):
            if "low_rank" not in inspect.signature(self._kernel).parameters:
                raise KernelInputError(
                    f"flce: the model's head has LoRA adapters, which {self._kernel.__module__} does not take. Choose"
                    " the provider ligerprof, or ce."
                )
            self._swapper.swap(layer, _SLOT, lora_forward)
        else:
            raise KernelInputError(
                f"flce: the model's head is a {_type_name(layer)}; the fused loss takes"
                " plain linear layers, LoRA on them, and modules_to_save. Use ce."
            )


def _type_name(layer: Any) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def refuse_adapters(head: Any, provider: str) -> None:
    """Raise if a head has adapters, for a provider that reads the base layer's weight.

    Raises:
        KernelInputError: the head has adapters.
    """
    if any("base_layer" in layer._modules for layer in _layers(head)):
        raise KernelInputError(
            f"flce: the model's head has adapters, which {provider}'s fused loss does not take. Choose the provider"
            " ligerprof, or ce."
        )


def _layers(head: Any) -> tuple[nn.Module, ...]:
    """The layers that compute a head's output: the base layer before its adapters."""
    return tuple(_walk(head))


def _walk(head: Any) -> Iterator[nn.Module]:
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        yield from _walk(head.original_module)
        for copy in copies.values():
            yield from _walk(copy)
        return
    if _is_lora(head) or _computes_loss(head):
        yield from _walk(head.base_layer) if "base_layer" in head._modules else ()
    yield head


def _computes_loss(layer: Any) -> bool:
    return bool(getattr(type(layer).forward, "computes_loss", False))


def _is_plain(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and "base_layer" not in layer._modules and layer.weight.is_floating_point()


def _is_lora(layer: Any) -> bool:
    """Whether its forward is that of peft's LoRA on a linear layer."""
    peft = sys.modules.get("peft.tuners.lora.layer")
    return peft is not None and type(layer).forward is peft.Linear.forward


def plain_forward(original: Forward, kernel: Kernel, budget: MeasuredBudget | None = None) -> Forward:
    """A linear layer's forward that computes the loss if it receives a request.

    Args:
        budget: chooses the workspace of each call; None: the options do.
    """

    @functools.wraps(original)
    def forward(
        self: Any, hidden: Tensor, loss: LossRequest | None = None, low_rank: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        if loss is None:
            logits: Tensor = original(self, hidden)
            return logits
        _refuse_parts(self)
        options = loss.options
        if budget is not None:
            rank = 0 if low_rank is None else low_rank[1].shape[-1]
            options = dataclasses.replace(options, budget=budget.next(hidden, self.weight, rank))
        factors = {} if low_rank is None else {"low_rank": low_rank}
        return kernel(hidden, self.weight, loss.labels, options, self.bias, loss.num_items, **factors)

    forward.computes_loss = True  # type: ignore[attr-defined]
    return forward


def _refuse_parts(head: Any) -> None:
    """Raise if a head's weight is only a part of it in this call: under tensor parallelism, or before FSDP gathers it.

    Raises:
        KernelInputError: the weight is a DTensor, or transformers has split it.
    """
    placements = getattr(head.weight, "placements", None)
    plan = getattr(head, "_hf_tp_plan", None)
    if placements is None and plan is None:
        return
    how = f"transformers' plan {plan!r}" if placements is None else f"a DTensor placed as {placements}"
    raise KernelInputError(
        f"flce: the head's weight is split over ranks ({how}), and the fused loss reads a whole one. Leave the head out"
        " of tensor parallelism, call the model under FSDP's own hooks, or use ce."
    )


def lora_forward(original: Forward) -> Forward:
    """The forward of peft's LoRA layer that computes the loss if it receives a request.

    The products of the thin matrices are added to the logits of a few tokens at a time.
    """

    @functools.wraps(original)
    def forward(self: Any, x: Tensor, *args: Any, loss: LossRequest | None = None, **kwargs: Any) -> Any:
        if loss is None:
            return original(self, x, *args, **kwargs)
        if self.disable_adapters and self.merged:
            self.unmerge()
        names = [] if self.disable_adapters or self.merged else [n for n in self.active_adapters if n in self.lora_A]
        if not names:
            return self.base_layer(x, loss=loss)
        parts = [_factors(self, x, name) for name in names]
        thin, wide = parts[0] if len(parts) == 1 else (torch.cat(part, dim=-1) for part in zip(*parts, strict=True))
        return self.base_layer(x, loss=loss, low_rank=(thin, wide))

    forward.computes_loss = True  # type: ignore[attr-defined]
    return forward


def _factors(layer: Any, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The two factors of an adapter's logits, [..., R] with its scaling and [V, R].

    Raises:
        KernelInputError: the adapter is not LoRA as it was published.
    """
    thin_layer, wide_layer = layer.lora_A[name], layer.lora_B[name]
    variant = layer.lora_variant.get(name) if hasattr(layer, "lora_variant") else None
    if variant is not None or wide_layer.bias is not None:
        kind = "a bias" if variant is None else f"a {type(variant).__name__}"
        raise KernelInputError(
            f"flce: the adapter {name!r} of the model's head has {kind}. Use plain LoRA there, or ce."
        )
    rows = layer._cast_input_dtype(x, thin_layer.weight.dtype)
    thin = thin_layer(layer.lora_dropout[name](rows)) * layer.scaling[name]
    # through the layer's own call, after hooks that gather its weight
    identity = torch.eye(wide_layer.in_features, dtype=wide_layer.weight.dtype, device=x.device)
    return thin, wide_layer(identity).t()


# arguments of a causal model's forward that the decoder does not take
_LOSS_ARGUMENTS = (
    "labels",
    "shift_labels",
    "num_items_in_batch",
    "ignore_index",
    "logits_to_keep",
    "skip_logits",
    "return_dict",
)

# (model, hidden states, request) -> loss. The request is one opaque object, so that wrappers do not cast its tensors
LossRunner = Callable[[nn.Module, Tensor, LossRequest], Tensor]


def fused_loss_forward(
    original: Forward,
    model_class: type[Any],
    row: Architecture,
    run_loss: LossRunner,
    options: LossOptions,
    *,
    text_only: bool = True,
) -> Forward:
    """A forward that returns the loss without logits if it receives labels in training.

    Without labels, and in evaluation unless `skip_logits=True` is passed, it calls the original forward: evaluation
    usually needs the logits.

    Args:
        original: the unbound forward of the model's class.
        model_class: whose output the forward returns.
        run_loss: computes the loss from the last hidden states.
        options: options of the loss; ignore_index, shift, softcap and logit_scale are replaced.
        text_only: whether the model has no vision tower, whose inputs the decoder does not take.
    """
    # without Signature.bind, because torch.compile traces this
    positional = tuple(inspect.signature(original).parameters)[1:]
    make_output = _output_maker(model_class)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = {**dict(zip(positional, args, strict=False)), **kwargs}
        given = {name: inputs.pop(name, None) for name in _LOSS_ARGUMENTS}
        fused = self.training if given["skip_logits"] is None else given["skip_logits"]
        if given["labels"] is None or not fused:
            given.pop("skip_logits")
            passed_on = {name: value for name, value in given.items() if value is not None}
            return original(self, **inputs, **passed_on)
        if row.auxiliary_loss is not None:
            _refuse_auxiliary_loss(row.auxiliary_loss, inputs, self.config)
        body = self.get_decoder() if text_only else self.base_model
        if body is self:
            # Llama 4's text model does not know its decoder
            body = self.get_submodule(row.final_norm.rpartition(".")[0])
        if not text_only and "labels" in inspect.signature(body.forward).parameters:
            inputs["labels"] = given["labels"]
        outputs = body(**inputs)
        text = self.config if text_only else self.config.get_text_config()
        hidden = _kept_positions(outputs.last_hidden_state, given["logits_to_keep"])
        loss = run_loss(self, hidden, _loss_request(given, hidden, _with_row(options, row, text)))
        output = make_output(outputs, loss)
        as_dict = self.config.return_dict if given["return_dict"] is None else given["return_dict"]
        return output if as_dict else output.to_tuple()

    return forward


def _refuse_auxiliary_loss(key: str, inputs: dict[str, Any], config: Any) -> None:
    asked = inputs.get(key)
    if getattr(config, key, False) if asked is None else asked:
        raise KernelInputError(
            f"{key} adds another loss to that of the logits, which the fused losses leave out. Turn it off, or leave"
            " flce and ce out."
        )


def loss_after_head(kernel: Callable[..., Tensor]) -> LossRunner:
    """Compute logits with the unchanged head, then the loss, whose gradient overwrites them.

    The result raises a KernelInputError if the head returns the logits of some words only.
    """

    def run(model: Any, hidden: Tensor, request: LossRequest) -> Tensor:
        head = model.get_output_embeddings()
        logits = head(hidden)
        words = getattr(head, "out_features", logits.shape[-1])
        if logits.shape[-1] != words or hasattr(logits, "to_local"):
            raise KernelInputError(
                f"ce: the head returned a part of the logits of {words} words, as under tensor parallelism. Let it"
                " gather them (output_layouts=Replicate()), or pass a VocabularyShard in your own code."
            )
        return kernel(logits, request.labels, request.options, request.num_items)

    return run


def _with_row(options: LossOptions, row: Architecture, config: Any) -> LossOptions:
    """The options with what the model does to its logits before the loss."""
    softcap = getattr(config, row.final_softcap.key, None) if row.final_softcap is not None else None
    factor = row.logit_factor(vars(config))
    if softcap is None and factor == 1.0:
        return options
    return dataclasses.replace(options, softcap=softcap, logit_scale=factor)


def _loss_request(given: dict[str, Any], hidden: Tensor, options: LossOptions) -> LossRequest:
    shifted = given["shift_labels"] is not None
    labels = given["shift_labels"] if shifted else given["labels"]
    ignore_index = IGNORE_INDEX if given["ignore_index"] is None else given["ignore_index"]
    return LossRequest(
        labels=labels.reshape(hidden.shape[:-1]) if labels.numel() == hidden.shape[:-1].numel() else labels,
        num_items=given["num_items_in_batch"],
        options=dataclasses.replace(options, shift=not shifted, ignore_index=ignore_index),
    )


def _kept_positions(hidden: Tensor, keep: int | Tensor | None) -> Tensor:
    """The positions that `logits_to_keep` selects in transformers."""
    if keep is None or (isinstance(keep, int) and keep == 0):
        return hidden
    if isinstance(keep, int):
        return hidden[:, -keep:, :]
    if keep.ndim == 2 and keep.dtype != torch.bool:
        return torch.take_along_dim(hidden, keep[..., None], dim=1)
    return hidden[keep] if keep.ndim == 2 else hidden[:, keep, :]


def _output_maker(model_class: type[Any]) -> Callable[[Any, Tensor], Any]:
    """A function that turns the decoder's outputs and the loss into the causal model's output, without logits.

    Raises:
        KernelInputError: the return type of the class's forward names no output of transformers.
    """
    output_class = _output_class(model_class)
    names = [field.name for field in dataclasses.fields(output_class) if field.name not in ("loss", "logits")]

    def make(outputs: Any, loss: Tensor) -> Any:
        return output_class(loss=loss, **{name: getattr(outputs, name, None) for name in names})

    return make


def _output_class(model_class: type[Any]) -> type[Any]:
    from transformers.utils.generic import ModelOutput

    # a user's subclass may leave out the type
    for base in model_class.__mro__:
        returned = getattr(vars(base).get("forward"), "__annotations__", {}).get("return")
        for candidate in get_args(returned) or (returned,):
            if isinstance(candidate, type) and issubclass(candidate, ModelOutput):
                return candidate
    raise KernelInputError(
        f"flce and ce: the return type of {model_class.__name__}.forward is not an output of transformers. Annotate it,"
        " or leave them out."
    )
