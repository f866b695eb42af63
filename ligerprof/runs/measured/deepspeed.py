"""A recipe's model under DeepSpeed's engine."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ligerprof.errors import LigerprofError, MissingDependencyError
from ligerprof.recipe.categories import Offload, Optimizer
from ligerprof.recipe.deepspeed import deepspeed_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.training import LEARNING_RATE, Training, built_model, call_settings, make_optimizer, skipped_logits

# far longer than DeepSpeedCPUAdam takes to build
_STALE_SECONDS = 900


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedTrainer(Training):
    """Training under DeepSpeed, with the engine that deepspeed.initialize returns."""

    engine: Any

    @property
    def ranks_differ(self) -> bool:
        """Whether ZeRO-1 or 2 cuts the ranks' parts from one flat tensor."""
        return self.recipe.gpus > 1 and self.recipe.zero in (1, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a micro-batch; partitioned weights are gathered."""
        loss: Tensor = self.engine(**batch, **call_settings(self.recipe.spec)).loss
        return loss

    def backward(self, loss: Tensor) -> None:
        """Compute gradients and reduce them across ranks; DeepSpeed scales the loss."""
        self.engine.backward(loss)
        if not self.engine.is_gradient_accumulation_boundary():
            # only counts the micro-batch
            self.engine.step()

    def update(self) -> None:
        """Clip the gradients, step the optimizer, drop the gradients."""
        self.engine.step()

    def drop_gradients(self) -> None:
        """Do nothing: DeepSpeed's step drops them."""

    def evaluate(self, batch: dict[str, Tensor]) -> None:
        """Compute the loss of an evaluation batch without gradients, as transformers' Trainer does.

        It calls the model, not the engine: ZeRO-3's hooks on the modules gather the weights.
        """
        model = self.engine.module
        model.eval()
        with torch.no_grad():
            model(**batch, **call_settings(self.recipe.spec), **skipped_logits(self.recipe))
        model.train()

    def notes(self) -> tuple[str, ...]:
        """The number of skipped steps, if any."""
        skipped, steps = self.engine.skipped_steps, self.engine.global_steps
        if not skipped:
            return ()
        return (f"{skipped} of {steps} steps updated nothing, for gradients beyond the loss scale",)


def require_deepspeed() -> None:
    """Raise MissingDependencyError unless deepspeed can be imported."""
    try:
        import deepspeed  # noqa: F401 - tests the import
    except ImportError as error:
        raise MissingDependencyError(
            f"--engine deepspeed needs deepspeed ({error}). Install it with: pip install deepspeed."
        ) from None


@contextmanager
def deepspeed_trainer(
    recipe: TrainingRecipe, device: torch.device, see_model: Callable[[nn.Module], None]
) -> Iterator[DeepSpeedTrainer]:
    """Build the model on a device and initialize DeepSpeed, as the rank that the environment variables give.

    Args:
        see_model: called with the model before DeepSpeed hooks it.

    Raises:
        LigerprofError: as `built_model`, or DeepSpeed cannot be initialized.
    """
    import deepspeed

    if recipe.offload is Offload.NVME:
        _require_async_io()
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    with built_model(recipe, device) as model:
        see_model(model)
        optimizer, config = partitioned_optimizer(recipe, model), deepspeed_config(recipe)
        with _config_errors_in_a_line(recipe):
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        yield DeepSpeedTrainer(recipe=recipe, engine=engine)


def _require_async_io() -> None:
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False):
        raise MissingDependencyError(
            "--offload nvme needs DeepSpeed's async_io, which cannot be built here. Install libaio-dev (`ds_report`)."
        )


@contextmanager
def _config_errors_in_a_line(recipe: TrainingRecipe) -> Iterator[None]:
    """Turn DeepSpeed's errors about a user's configuration into one line."""
    try:
        yield
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        if recipe.deepspeed_config is None:
            raise
        reason = " ".join(str(error).split())[:300]
        raise LigerprofError(f"--deepspeed-config: DeepSpeed refuses it ({type(error).__name__}: {reason}).") from error


def _require_no_stale_lock() -> None:
    """Raise if a killed build left its lock, for which torch would wait forever."""
    from torch.utils.cpp_extension import _get_build_directory

    lock = Path(_get_build_directory("cpu_adam", verbose=False)) / "lock"
    with suppress(FileNotFoundError):
        if time.time() - lock.stat().st_mtime > _STALE_SECONDS:
            raise LigerprofError(f"{lock}: left by a build of DeepSpeedCPUAdam that did not end. Remove it.")


def partitioned_optimizer(recipe: TrainingRecipe, model: nn.Module) -> Any:
    """The recipe's optimizer over the trainable parameters; DeepSpeed moves its states."""
    if recipe.optimizer is not Optimizer.DEEPSPEED_CPU_ADAM:
        return make_optimizer(recipe, model)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    _require_no_stale_lock()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        return DeepSpeedCPUAdam(trainable, lr=LEARNING_RATE)
    except Exception as error:
        # the first use compiles it, and a failing compiler can raise any exception
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LigerprofError(
            f"DeepSpeedCPUAdam cannot be built here ({reason}). See `ds_report`; it needs a C++ compiler and ninja."
        ) from error
