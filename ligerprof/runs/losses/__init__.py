"""Losses over the vocabulary in place of the model's own: those of older transformers, TRL, torch and torchtitan."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ligerprof.errors import MissingDependencyError
from ligerprof.recipe.categories import Loss
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.losses import chunked_nll
from ligerprof.runs.losses.tiled_log_probabilities import TiledLogProbabilities
from ligerprof.torch_memory.chunked_losses import TITAN_CHUNKS

__all__ = ["install_loss"]

_IGNORED = -100


def install_loss(model: Any, recipe: TrainingRecipe) -> None:
    """Give a transformers model the forward of the recipe's loss, before adapters and engines wrap it.

    Raises:
        MissingDependencyError: the installed torch does not have the loss.
    """
    if recipe.loss is not Loss.HF:
        decoder = recipe.spec.architecture.final_norm.rpartition(".")[0] if model.base_model is model else None
        _replace_forward(model, _forward_of(recipe), decoder)


def _forward_of(recipe: TrainingRecipe) -> Callable[..., Any]:
    evaluated_tokens = 0 if recipe.evaluation is None else recipe.evaluation.labelled_tokens
    if recipe.loss is Loss.HF_4_45:
        return _legacy_forward
    if recipe.loss is Loss.CHUNKED_NLL:
        return chunked_nll.make_forward(recipe.labelled_tokens, evaluated_tokens)
    if recipe.loss is Loss.TRL_TILED:
        return _tiled_forward(recipe.labelled_tokens, evaluated_tokens)
    if recipe.loss is Loss.TORCH_LINEAR:
        return _torch_linear_forward()
    return _titan_forward(recipe.labelled_tokens, recipe.grad_accum)


def _replace_forward(model: Any, forward: Callable[..., Any], decoder: str | None) -> None:
    """Replace the model's forward through a subclass, so that wrappers and other patches see an ordinary method.

    Args:
        decoder: the decoder's name if the model, as Llama 4's text model, does not know it.
    """
    modern = type(model)
    body: dict[str, Any] = {"forward": forward, "__module__": modern.__module__, "__qualname__": modern.__qualname__}
    if decoder is not None:
        body["base_model"] = property(lambda self: self.get_submodule(decoder))
    model.__class__ = type(modern.__name__, (modern,), body)


def _legacy_forward(self: Any, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
    """`--loss hf-4.45`: logits in fp32, a shifted copy, cross-entropy on that.

    Written from LlamaForCausalLM.forward in modeling_llama.py of v4.45.2. Together with the log-probabilities, three
    tensors of batch * seq * vocab * 4 bytes are alive at once; the 16-bit logits are freed right after the cast.
    """
    from transformers.modeling_outputs import CausalLMOutputWithPast

    hidden = self.base_model(input_ids=input_ids, **kwargs)[0]
    logits = _capped(self.get_output_embeddings()(hidden), self.config).float()
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = labels[..., 1:].contiguous()
    shift_logits = shift_logits.view(-1, logits.shape[-1])
    loss = nn.CrossEntropyLoss()(shift_logits, shift_labels.view(-1))
    return CausalLMOutputWithPast(loss=loss, logits=logits)


def _capped(logits: Tensor, config: Any) -> Tensor:
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else (logits / cap).tanh() * cap


def _torch_linear_forward() -> Callable[..., Any]:
    """`--loss torch-linear`: F.linear_cross_entropy with its default chunks; labels are shifted.

    Raises:
        MissingDependencyError: before torch 2.13.
    """
    fused = getattr(functional, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if fused is None or options is None:
        raise MissingDependencyError(
            f"--loss torch-linear: torch {torch.__version__} has no chunked F.linear_cross_entropy. Install torch 2.13"
            " or later, or choose another --loss."
        )

    def forward(self: Any, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        hidden = self.base_model(input_ids=input_ids, **kwargs)[0]
        weight = self.get_output_embeddings().weight
        rows = hidden.view(-1, hidden.size(-1)).to(weight.dtype)
        shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        return CausalLMOutputWithPast(loss=fused(rows, weight, shifted, options=options()))

    return forward


def _tiled_forward(labelled_tokens: int, evaluated_tokens: int) -> Callable[..., Any]:
    """`--loss trl-tiled`: TRL's loss since version 1.15, logits in tiles of 4096 tokens and 32,768 words.

    Written from `add_fused_lm_head` in trl/trainer/utils.py of TRL 1.16. Only tokens with a label are projected.

    Args:
        labelled_tokens: tokens of a micro-batch whose successor has a label. TRL reads the number from the GPU.
        evaluated_tokens: the same of an evaluation batch.
    """

    def forward(self: Any, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        kwargs.pop("skip_logits", None)
        hidden = self.base_model(input_ids=input_ids, **kwargs)[0][:, :-1]
        following = labels[:, 1:]
        has_label = following != _IGNORED
        rows, columns = has_label.nonzero_static(size=labelled_tokens if self.training else evaluated_tokens).unbind(1)
        head, cap = self.get_output_embeddings(), getattr(self.config, "final_logit_softcapping", None)
        scored = TiledLogProbabilities.apply(  # type: ignore[no-untyped-call]
            hidden[rows, columns], head.weight, following[rows, columns], cap
        )
        log_probabilities, _, _ = (
            values.new_zeros(has_label.shape).masked_scatter(has_label, values) for values in scored
        )
        return CausalLMOutputWithPast(loss=-log_probabilities.sum() / has_label.sum().clamp(min=1))

    return forward


def _titan_forward(labelled_tokens: int, grad_accum: int) -> Callable[..., Any]:
    """`--loss titan-chunked`: head, loss and their backward in eight chunks of the tokens.

    Written from `ChunkedLossWrapper` and `GradAccumulator` in torchtitan/components/loss.py (August 2026). The
    gradients of the head's weight exist before the model's backward begins, which starts from an fp32 sum of the
    chunks' gradients of the hidden states.

    Args:
        labelled_tokens: tokens of a micro-batch whose successor has a label.
        grad_accum: micro-batches per step; the head's gradients are divided by it, as the trainer divides the loss.
    """
    divisor = max(labelled_tokens, 1) * grad_accum

    def forward(self: Any, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        hidden = self.base_model(input_ids=input_ids, **kwargs)[0]
        rows = hidden.view(-1, hidden.size(-1))
        shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        loss = _titan_loss(rows, self.get_output_embeddings(), shifted, divisor)
        return CausalLMOutputWithPast(loss=loss * grad_accum)

    return forward


def _titan_loss(hidden: Tensor, head: Any, labels: Tensor, divisor: int) -> Tensor:
    needs_gradient = hidden.requires_grad
    size = len(labels) // TITAN_CHUNKS
    chunks = [part.contiguous().detach().requires_grad_(needs_gradient) for part in torch.split(hidden, size)]
    gradients = torch.zeros_like(hidden, dtype=torch.float32) if needs_gradient else None
    total = hidden.new_zeros((), dtype=torch.float32)
    for number, (chunk, of_chunk) in enumerate(zip(chunks, torch.split(labels, size), strict=True)):
        logits = head(chunk)
        loss = functional.cross_entropy(logits.float(), of_chunk, reduction="sum", ignore_index=-100) / divisor
        total = total + loss.detach()
        if gradients is not None:
            torch.autograd.backward(loss)
            gradient, chunk.grad = chunk.grad, None
            assert gradient is not None
            gradients[number * size : (number + 1) * size] = gradient.to(torch.float32)
            del gradient
    if gradients is None:
        return total
    loss_of_all: Tensor = _GradientOfHidden.apply(hidden, gradients.to(hidden.dtype), total)  # type: ignore[no-untyped-call]
    return loss_of_all


class _GradientOfHidden(torch.autograd.Function):
    """The loss, with a gradient of the hidden states that is already computed."""

    @staticmethod
    def forward(ctx: Any, _hidden: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Any:
        return *ctx.saved_tensors, None, None
