"""One training step of a recipe; the same code runs on a GPU and on fake tensors."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ligerprof.analyzers.estimate import settle_flce_budget
from ligerprof.errors import MissingDependencyError, RecipeError, UnknownModelError
from ligerprof.models import ModelSpec
from ligerprof.recipe.categories import Attention, Loss
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase
from ligerprof.runs.legacy_loss import use_legacy_loss
from ligerprof.runs.low_bit import (
    adapt_quantized,
    linears_unmade,
    low_bit_optimizer,
    quantize_linears,
)

LEARNING_RATE = 1e-5
IGNORED_LABEL = -100


class PhaseObserver(Protocol):
    """Observes the phases of a step, to measure or stamp them."""

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """A context around a phase; gradients are dropped in OUTSIDE."""
        ...

    def loss_made(self, loss: Tensor) -> None:
        """Called with the loss before backward."""
        ...


class Training(Protocol):
    """A model under an engine, with what a training step calls."""

    @property
    def recipe(self) -> TrainingRecipe:
        """What is trained and how."""
        ...

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a micro-batch."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Compute or accumulate gradients."""
        ...

    def update(self) -> None:
        """Clip the gradients and step the optimizer."""
        ...

    def drop_gradients(self) -> None:
        """Set every gradient to None."""
        ...

    def notes(self) -> tuple[str, ...]:
        """Remarks about the steps so far, one sentence each."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """The state of training in plain torch.

    Attributes:
        device_type: the device type of autocast (`cpu` under the simulator).
        scaler: loss scaling for amp-fp16, else None.
    """

    recipe: TrainingRecipe
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    scaler: torch.amp.GradScaler | None
    device_type: str

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a micro-batch, divided by the number of accumulated ones."""
        recipe = self.recipe
        dtype = getattr(torch, recipe.autocast) if recipe.autocast else None
        with torch.autocast(self.device_type, dtype, enabled=dtype is not None):
            loss: Tensor = self.model(**batch, use_cache=False).loss
        return loss if recipe.grad_accum == 1 else loss / recipe.grad_accum

    def backward(self, loss: Tensor) -> None:
        """Compute or accumulate gradients, of the scaled loss if there is a scaler."""
        scaled: Any = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()

    def update(self) -> None:
        """Clip the gradients and step the optimizer, if there is one."""
        optimizer, clip = self.optimizer, self.recipe.clip
        if optimizer is None:
            return
        if self.scaler is not None and clip:
            self.scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def drop_gradients(self) -> None:
        """Set every gradient to None."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.model.zero_grad(set_to_none=True)

    def notes(self) -> tuple[str, ...]:
        """No remarks."""
        return ()


@contextmanager
def torch_trainer(
    recipe: TrainingRecipe, device: torch.device, see_model: Callable[[nn.Module], None]
) -> Iterator[Trainer]:
    """Build model and optimizer on a CUDA device, for `--engine torch`.

    Args:
        see_model: called with the model before anything wraps it.

    Raises:
        LigerprofError: as `built_model`.
    """
    with built_model(recipe, device) as model:
        see_model(model)
        scaler = torch.amp.GradScaler("cuda") if recipe.autocast == "float16" else None
        optimizer = make_optimizer(recipe, model)
        yield Trainer(recipe=recipe, model=model, optimizer=optimizer, scaler=scaler, device_type="cuda")


@contextmanager
def built_model(recipe: TrainingRecipe, device: torch.device) -> Iterator[nn.Module]:
    """The transformers model of a recipe on a device, in training mode, with its kernels and adapters.

    Kernels also patch modules of transformers; these patches are removed at the end.

    Args:
        device: a CUDA device, or the CPU under the simulator.

    Raises:
        KernelUnavailableError: a kernel cannot run there.
        MissingDependencyError: LoRA without peft.
        RecipeError: the architecture does not support the recipe's attention.
        UnknownModelError: transformers has no such causal language model.
    """
    config, model_class = _architecture(recipe.spec)
    _require_attention(model_class, recipe)
    settings = {"dtype": getattr(torch, recipe.weight_dtype), "attn_implementation": recipe.attention.value}
    if recipe.spec.weights_path is not None and device.type != "cpu":
        model = model_class.from_pretrained(recipe.spec.weights_path, config=config, **settings).to(device)
    else:
        with device, linears_unmade(recipe):
            model = model_class._from_config(config, **settings)
    quantize_linears(model, recipe, device)
    with _kernels_in(model, recipe, "cuda" if device.type == "cuda" else "simulated"):
        yield _prepared(model, recipe)


def _require_attention(model_class: Any, recipe: TrainingRecipe) -> None:
    # Gemma 2 supports it in transformers 5.17 and not in 5.23: the fused kernels do not cap its scores
    if recipe.attention is Attention.SDPA and not model_class._supports_sdpa:
        import transformers

        capped = ", whose scores are capped," if recipe.spec.attention_softcap is not None else ""
        raise RecipeError(
            f"{recipe.spec.name}: transformers {transformers.__version__} has no sdpa for"
            f" {recipe.spec.model_type}{capped} and refuses it. Add --attention eager."
        )


def _kernels_in(model: Any, recipe: TrainingRecipe, device_kind: str) -> AbstractContextManager[Any]:
    if not recipe.kernels:
        return nullcontext()
    from ligerprof.kernels import apply

    return apply(
        model,
        "+".join(recipe.kernels),
        provider=recipe.provider,
        flce_budget=settle_flce_budget(recipe).flce_budget,
        device_kind=device_kind,
    )


def _prepared(model: Any, recipe: TrainingRecipe) -> nn.Module:
    if recipe.loss is Loss.HF_4_45:
        use_legacy_loss(model)
    rank = recipe.lora or recipe.qlora
    if rank is not None:
        model = _with_lora(model, rank, recipe)
    if recipe.qlora is not None:
        adapt_quantized(model)
    if recipe.checkpointing:
        _checkpoint_layers(model, {"use_reentrant": recipe.reentrant})
    model.train()
    trained: nn.Module = model
    return trained


def _checkpoint_layers(model: Any, settings: dict[str, bool]) -> None:
    # transformers 5.2x renamed it, and warns if the older name is called
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def _architecture(spec: ModelSpec) -> tuple[Any, Any]:
    """The transformers config of a model and the class that it configures.

    The import must come before any device context, since imported modules may create tensors.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    values = spec.config
    try:
        config: Any = AutoConfig.for_model(values.pop("model_type"), **values)
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (KeyError, ValueError) as error:
        raise UnknownModelError(
            f"{spec.name}: transformers has no causal language model for {spec.model_type!r} ({error})."
        ) from None
    config.use_cache = False
    return config, model_class


def _with_lora(model: Any, rank: int, recipe: TrainingRecipe) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise MissingDependencyError("--lora needs peft. Install it with: pip install 'ligerprof[peft]'.") from None
    targets = list(recipe.spec.architecture.lora_targets)
    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=16, target_modules=targets))
    if recipe.checkpointing:
        adapted.enable_input_require_grads()
    return adapted


def make_optimizer(recipe: TrainingRecipe, model: nn.Module) -> torch.optim.Optimizer | None:
    """The recipe's optimizer over the trainable parameters, or None."""
    if recipe.optimizer.compresses_moments:
        return low_bit_optimizer(recipe, model, LEARNING_RATE)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw-fused": lambda: torch.optim.AdamW(trainable, lr=LEARNING_RATE, fused=True),
        "adamw-foreach": lambda: torch.optim.AdamW(trainable, lr=LEARNING_RATE, foreach=True),
        "sgd": lambda: torch.optim.SGD(trainable, lr=LEARNING_RATE, foreach=True),
    }
    maker = makers.get(recipe.optimizer)
    return maker() if maker is not None else None


def make_batch(recipe: TrainingRecipe, device: torch.device) -> dict[str, Tensor]:
    """Random tokens, also used as labels; with padding, a mask and ignored labels at the end of each row."""
    ids = torch.randint(0, recipe.spec.vocab_size, (recipe.batch, recipe.seq), device=device)
    padded = round(recipe.padding * recipe.seq)
    if padded == 0:
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids)
    mask[:, recipe.seq - padded :] = 0
    labels = ids.masked_fill(mask == 0, IGNORED_LABEL)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train_step(trainer: Training, batch: dict[str, Tensor], observer: PhaseObserver) -> Tensor:
    """Run forward and backward of every micro-batch, then the optimizer; gradients are None at the end.

    Returns:
        The last micro-batch's loss, detached.
    """
    for _ in range(trainer.recipe.grad_accum):
        with observer.phase(Phase.FORWARD):
            loss = trainer.forward(batch)
            observer.loss_made(loss)
        with observer.phase(Phase.BACKWARD):
            trainer.backward(loss)
    with observer.phase(Phase.OPTIMIZER):
        trainer.update()
    with observer.phase(Phase.OUTSIDE):
        trainer.drop_gradients()
    return loss.detach()
