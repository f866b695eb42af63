"""A causal language model's forward with a fused loss, for every architecture."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ligerprof.errors import KernelInputError
from ligerprof.kernels.options import IGNORE_INDEX, LossOptions, LossRequest
from ligerprof.models.architecture import Architecture

Forward = Callable[..., Any]

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
