"""One training step of a recipe; the same code runs on a GPU and on a simulated one."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ligerprof.analyzers.estimate import settle_flce_budget
from ligerprof.errors import RecipeError, UnknownModelError
from ligerprof.kernels.device import is_simulated
from ligerprof.kernels.selection import kernel_set_text
from ligerprof.models import ModelSpec
from ligerprof.models.architectures import is_in_layer
from ligerprof.models.spec import Task
from ligerprof.recipe.categories import Attention, Optimizer
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Phase
from ligerprof.runs.activation_offload import ActivationOffload, enable_checkpointing
from ligerprof.runs.losses import install_loss
from ligerprof.runs.low_bit import linears_on_meta, low_bit_optimizer, quantize_linears, with_adapters
from ligerprof.torch_memory.low_bit import is_hidden_matrix


class MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim.Muon and fused AdamW as one optimizer of a model's trainable parameters."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hidden = is_hidden_matrix(in_layer=is_in_layer(name), dimensions=parameter.dim())
                (matrices if hidden else others).append(parameter)
        super().__init__([*others, *matrices], {})
        self._parts: list[torch.optim.Optimizer] = []
        # either may be without parameters: with LoRA, all are matrices
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=learning_rate, fused=True))
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, lr=learning_rate))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for part in self._parts:
            part.step()


def different_micro_batches(count: int, state: Callable[[], Hashable] | None) -> Iterator[int]:
    """The numbers of the micro-batches to run, from 1.

    Args:
        count: micro-batches of the step, all of one shape.
        state: what decides about coming allocations, called after each micro-batch. Once a state comes back, whole
            rounds from that state to itself are left out. All micro-batches run if it is None.
    """
    number = 1
    seen: dict[Hashable, int] = {}
    while number <= count:
        yield number
        if state is not None and seen.setdefault(found := state(), number) != number:
            each = number - seen[found]
            number += (count - number) // each * each
            state = None
        number += 1


LEARNING_RATE = 1e-5
# transformers' classes by config
_CLASSES: Mapping[Task, str] = {
    Task.CAUSAL: "MODEL_FOR_CAUSAL_LM_MAPPING",
    Task.MASKED: "MODEL_FOR_MASKED_LM_MAPPING",
    Task.SEQUENCES: "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    Task.TOKENS: "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    Task.IMAGES: "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
}


class PhaseObserver(Protocol):
    """Observes the phases of a step, to measure or stamp them."""

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """A context around a phase; gradients are dropped in OUTSIDE."""

    def loss_made(self, loss: Tensor) -> None:
        """Called with the loss before backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training(ABC):
    """A model under an engine: the calls of a training step."""

    recipe: TrainingRecipe

    @property
    def ranks_differ(self) -> bool:
        """Whether ranks hold different sizes."""
        return False

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Prepare for the next micro-batch; `is_last`: the optimizer steps after it."""
        del is_last

    @abstractmethod
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a micro-batch."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Compute or accumulate gradients."""

    @abstractmethod
    def update(self) -> None:
        """Clip the gradients and step the optimizer."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Set every gradient to None."""

    @abstractmethod
    def evaluate(self, batch: dict[str, Tensor]) -> None:
        """Compute the loss of an evaluation batch without gradients."""

    def notes(self) -> tuple[str, ...]:
        """Remarks about the steps so far, one sentence each."""
        return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer(Training):
    """Training in plain torch.

    Attributes:
        scaler: loss scaling for amp-fp16 and fp16-amp, else None.
        offload: moves what autograd saves in a micro-batch to main memory, or None.
        compiled: the model as torch.compile returns it, or None.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    scaler: torch.amp.GradScaler | None
    device_type: str
    offload: ActivationOffload | None = None
    compiled: Callable[..., Any] | None = None

    def _output(self, batch: dict[str, Tensor], **settings: bool) -> Any:
        """What the model returns for a batch under the recipe's autocast."""
        dtype = getattr(torch, self.recipe.autocast) if self.recipe.autocast else None
        call = self.model if self.compiled is None else self.compiled
        with torch.autocast(self.device_type, dtype, enabled=dtype is not None):
            return call(**batch, **call_settings(self.recipe.spec), **settings)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a micro-batch, divided by `grad_accum`."""
        with self._offloading_until_backward():
            loss: Tensor = self._output(batch).loss
        return loss if self.recipe.grad_accum == 1 else loss / self.recipe.grad_accum

    def evaluate(self, batch: dict[str, Tensor]) -> None:
        """Compute the loss of an evaluation batch without gradients, as transformers' Trainer does.

        It keeps the logits of no batch (`prediction_loss_only`, which `Trainer.evaluate` sets where there is no
        `compute_metrics`). Under autocast, accelerate returns the logits in fp32. A fused loss returns none, as the
        Trainer asks of liger-kernel's.
        """
        self.model.eval()
        with torch.no_grad():
            output = self._output(batch, **skipped_logits(self.recipe))
            if self.recipe.autocast and output.logits is not None:
                output.logits = output.logits.float()
        self.model.train()

    def backward(self, loss: Tensor) -> None:
        """Compute or accumulate gradients; a scaler scales the loss first."""
        scaled: Any = loss if self.scaler is None else self.scaler.scale(loss)
        try:
            scaled.backward()
        finally:
            if self.offload is not None:
                self.offload.__exit__()

    @contextmanager
    def _offloading_until_backward(self) -> Iterator[None]:
        """Move saved tensors from here to the end of `backward`, which recomputes layers."""
        if self.offload is None:
            yield
            return
        self.offload.__enter__()
        try:
            yield
        except BaseException:
            self.offload.__exit__()
            raise

    def update(self) -> None:
        optimizer, clip = self.optimizer, self.recipe.clip
        if optimizer is None:
            return
        if self.scaler is not None and clip:
            self.scaler.unscale_(optimizer)
        if clip:
            self.clip_gradients(clip)
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def clip_gradients(self, largest: float) -> None:
        """Scale the gradients so that their norm is `largest` at most."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), largest)

    def drop_gradients(self) -> None:
        (self.optimizer or self.model).zero_grad(set_to_none=True)


def call_settings(spec: ModelSpec) -> dict[str, bool]:
    """What a model is called with besides the batch."""
    return {"use_cache": False} if spec.task.predicts_tokens else {}


def skipped_logits(recipe: TrainingRecipe) -> dict[str, bool]:
    """What an evaluation passes to a model whose loss is fused: it makes no logits."""
    # liger-kernel's ce replaces a function below the model, which does not know the argument
    fused = "flce" in recipe.kernels or ("ce" in recipe.kernels and recipe.provider != "liger")
    return {"skip_logits": True} if fused else {}


@contextmanager
def torch_trainer(
    recipe: TrainingRecipe, device: torch.device, see_model: Callable[[nn.Module], None]
) -> Iterator[Trainer]:
    """Build model and optimizer on a CUDA device for `--engine torch`; raises as `built_model` does.

    Args:
        see_model: called with the model before anything wraps it.
    """
    with built_model(recipe, device) as model:
        see_model(model)
        yield make_trainer(recipe, model, "cuda")


def make_trainer(recipe: TrainingRecipe, model: nn.Module, device_type: str) -> Trainer:
    """A trainer of a built model, with its optimizer and loss scaler."""
    scaler, optimizer = make_scaler(recipe, device_type), make_optimizer(recipe, model)
    return Trainer(
        recipe=recipe,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        device_type=device_type,
        offload=ActivationOffload(model) if recipe.activation_offload else None,
        # the whole model, as accelerate compiles it for transformers' Trainer
        compiled=torch.compile(model) if recipe.compile else None,
    )


def make_scaler(recipe: TrainingRecipe, device_type: str) -> torch.amp.GradScaler | None:
    """The loss scaler of autocast in fp16, else None."""
    return torch.amp.GradScaler(device_type) if recipe.autocast == "float16" else None


@contextmanager
def built_model(recipe: TrainingRecipe, device: torch.device, *, on_meta: bool = False) -> Iterator[nn.Module]:
    """The transformers model of a recipe in training mode, with its kernels and adapters.

    Kernels also patch modules of transformers; these patches are removed at exit.

    Args:
        device: a CUDA device; the CPU for tests.
        on_meta: create the weights on the meta device, without memory; the caller allocates them on `device`.

    Raises:
        KernelUnavailableError: a kernel cannot run on the device.
        MissingDependencyError: peft, or bitsandbytes on a GPU, is not installed.
        RecipeError: the architecture does not support the recipe's attention.
        UnknownModelError: transformers does not have the causal language model.
    """
    model = load_model(recipe, torch.device("meta") if on_meta else device)
    if recipe.packed_bits is not None:
        quantize_linears(model, recipe, device)
    patched: AbstractContextManager[Any] = nullcontext()
    if recipe.kernels:
        from ligerprof.kernels import apply

        kind = "cuda" if device.type == "cuda" and not is_simulated() else "simulated"
        budget = settle_flce_budget(recipe).flce_budget
        patched = apply(model, kernel_set_text(recipe.providers), flce_budget=budget, device_kind=kind)
    with patched:
        yield _prepared(model, recipe)


def load_model(recipe: TrainingRecipe, device: torch.device) -> Any:
    """The plain transformers model: random weights, or those of the recipe's folder if the device holds values.

    Raises:
        RecipeError: the architecture does not support the recipe's attention.
        UnknownModelError: transformers does not have the causal language model.
    """
    config, model_class = find_architecture(recipe.spec)
    _require_attention(model_class, recipe)
    settings = {"dtype": getattr(torch, recipe.weight_dtype), "attn_implementation": recipe.attention.value}
    if recipe.experts is not None:
        settings["experts_implementation"] = recipe.experts.value
    if recipe.spec.weights_path is not None and device.type != "meta" and not is_simulated():
        return model_class.from_pretrained(recipe.spec.weights_path, config=config, **settings).to(device)
    with device, linears_on_meta() if recipe.packed_bits is not None else nullcontext():
        return model_class._from_config(config, **settings)


def _require_attention(model_class: Any, recipe: TrainingRecipe) -> None:
    # transformers 5.17 supports it for Gemma 2 and 5.23 does not, because the fused kernels do not cap its scores
    if recipe.attention is Attention.SDPA and not model_class._supports_sdpa:
        import transformers

        capped = ", whose scores are capped," if recipe.spec.attention_softcap is not None else ""
        raise RecipeError(
            f"{recipe.spec.name}: transformers {transformers.__version__} has no sdpa for"
            f" {recipe.spec.model_type}{capped} and refuses it. Add --attention eager."
        )


def _prepared(model: Any, recipe: TrainingRecipe) -> nn.Module:
    install_loss(model, recipe)
    rank = recipe.lora or recipe.qlora
    if rank is not None:
        model = with_adapters(model, rank, recipe)
    if recipe.packed_bits is not None:
        from ligerprof.runs.simulated.low_bit import adapt_as_over_bitsandbytes

        adapt_as_over_bitsandbytes(model)
    if recipe.checkpointing:
        enable_checkpointing(model, recipe)
    trained: nn.Module = model.train()
    return trained


def find_architecture(spec: ModelSpec) -> tuple[Any, Any]:
    """Import a model's transformers config and class; outside of device contexts: imports may create tensors.

    Raises:
        UnknownModelError: transformers does not have the class.
    """
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    values = spec.config
    try:
        config: Any = AutoConfig.for_model(values.pop("model_type"), **values)
        model_class: Any = getattr(modeling_auto, _CLASSES[spec.task])[type(config)]
    except (KeyError, ValueError) as error:
        if sys.flags.optimize > 1:
            raise UnknownModelError(
                f"{spec.name}: transformers reads docstrings, which python -OO leaves out. Run python without -OO."
            ) from None
        raise UnknownModelError(
            f"{spec.name}: transformers has no class that ends in For{spec.task} for {spec.model_type!r} ({error})."
        ) from None
    config.use_cache = False
    if spec.task is Task.SEQUENCES and config.pad_token_id is None:
        # decoders look for the last token before the padding
        config.pad_token_id = 0
    return config, model_class


def make_optimizer(recipe: TrainingRecipe, model: nn.Module) -> torch.optim.Optimizer | None:
    """The recipe's optimizer over the trainable parameters, or None."""
    if recipe.optimizer.row.package is not None:
        return low_bit_optimizer(recipe, model, LEARNING_RATE)
    if recipe.optimizer is Optimizer.MUON:
        return MuonWithAdamW(model, LEARNING_RATE)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made: Any = None
    if recipe.optimizer is Optimizer.ADAFACTOR_HF:
        from transformers.optimization import Adafactor

        made = partial(Adafactor, scale_parameter=False, relative_step=False)
    elif recipe.optimizer.row.made is not None:
        name, implementation = recipe.optimizer.row.made
        made = partial(getattr(torch.optim, name), **implementation)
    return None if made is None else made(trainable, lr=LEARNING_RATE)


def make_batch(recipe: TrainingRecipe, device: torch.device) -> dict[str, Tensor]:
    """Random tokens, also used as labels unless the model classifies; padding adds a mask, and ignored labels.

    A packed batch is what transformers' DataCollatorWithFlattening returns.
    """
    ids = torch.randint(0, recipe.spec.vocab_size, (recipe.rows, recipe.row_tokens), device=device)
    if recipe.packing:
        return _packed_batch(ids, recipe.packed_lengths)
    batch = {"input_ids": ids}
    if padded := recipe.padded_tokens:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][:, ids.shape[1] - padded :] = 0
    if not recipe.spec.task.predicts_tokens:
        batch["labels"] = _labels(recipe, device)
    else:
        # cross-entropy ignores the label -100
        batch["labels"] = ids.masked_fill(batch["attention_mask"] == 0, -100) if padded else ids
    return batch


def _labels(recipe: TrainingRecipe, device: torch.device) -> Tensor:
    """Labels of a classifier, one a sequence or one a token, or of a masked language model."""
    spec = recipe.spec
    if spec.task is Task.SEQUENCES and spec.labels == 1:
        return torch.zeros(recipe.batch, device=device)
    shape = (recipe.batch,) if spec.task is Task.SEQUENCES else (recipe.batch, recipe.seq)
    return torch.randint(0, spec.vocab_size if spec.task is Task.MASKED else spec.labels, shape, device=device)


def _packed_batch(ids: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Positions restart with each document, whose first token is not predicted."""
    positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths]).unsqueeze(0)
    # cross-entropy ignores the label -100
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


def train_step(
    trainer: Training, batch: dict[str, Tensor], observer: PhaseObserver, state: Callable[[], Hashable] | None = None
) -> Tensor:
    """Train on each micro-batch, step the optimizer and drop the gradients; returns the last loss, detached.

    Args:
        state: what decides about coming allocations; if given, micro-batches that repeat earlier ones are left out.
    """
    micro_batches = trainer.recipe.grad_accum
    for number in different_micro_batches(micro_batches, state):
        trainer.begin_micro_batch(is_last=number == micro_batches)
        with observer.phase(Phase.FORWARD):
            loss = trainer.forward(batch)
            observer.loss_made(loss)
        with observer.phase(Phase.BACKWARD):
            trainer.backward(loss)
            # transformers' Trainer returns it detached, and so frees the graph before anything else runs
            loss = loss.detach()
    with observer.phase(Phase.OPTIMIZER):
        trainer.update()
    with observer.phase(Phase.OUTSIDE):
        trainer.drop_gradients()
    return loss
