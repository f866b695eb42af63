"""A user's own `nn.Module`, sent to the process that traces it: code and shapes of tensors, without their values."""

import hashlib
import inspect
import io
import pickle
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.models import ModelSpec, spec_from_config
from ligerprof.recipe.categories import Loss
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.activation_offload import checkpointed_layers
from ligerprof.runs.simulated.rank import GPU, built_for_simulation
from ligerprof.runs.training import Trainer, make_trainer

# the outputs of a module and the labels in, a scalar out
LossFunction = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnModule:
    """A module and its loss function as bytes, without the values of tensors.

    Attributes:
        path: where the other process finds the modules of classes.
    """

    pickled: bytes
    path: tuple[str, ...]


def packed(model: nn.Module, loss: LossFunction | None) -> OwnModule:
    """A module and its loss function, for another process.

    Raises:
        UnsupportedError: a class or a function cannot be found by another process.
    """
    file = io.BytesIO()
    try:
        _pickler(file).dump((model, loss))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UnsupportedError(
            f"estimate: {type(model).__name__} cannot be sent to the process that traces it ({error}). Define its"
            " classes and the loss at the top of a module, or install cloudpickle."
        ) from None
    if find_spec("cloudpickle") is None and b"__main__" in file.getvalue():
        raise UnsupportedError(
            f"estimate: {type(model).__name__} or its loss is defined in the program itself, which another process"
            " cannot import. Move it to a module of its own, or install cloudpickle."
        )
    return OwnModule(pickled=zlib.compress(file.getvalue()), path=tuple(sys.path))


def spec_of(model: nn.Module, loss: LossFunction | None, own: OwnModule) -> ModelSpec:
    """What is known of a module: its code's digest, its largest embedding and its layers."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    largest = max(tables, key=lambda table: table.num_embeddings, default=None)
    kind = type(model)
    config = {
        "model_type": f"{kind.__module__}.{kind.__qualname__}",
        "vocab_size": 1 if largest is None else largest.num_embeddings,
        "hidden_size": 1 if largest is None else largest.embedding_dim,
        "num_hidden_layers": max(len(checkpointed_layers(model)), 1),
        "own_module": _digest(model, loss, own),
    }
    return spec_from_config(config, name=kind.__name__)


@contextmanager
def own_trainer(recipe: TrainingRecipe, own: OwnModule) -> Iterator[Trainer]:
    """A trainer of the module on this process's simulated GPU; raises as `simulate_step` does."""
    sys.path[:] = own.path
    with built_for_simulation(recipe):
        model, loss = _Unpickler(io.BytesIO(zlib.decompress(own.pickled))).load()
        model.forward = partial(_run, model.forward, loss)
        yield make_trainer(recipe, model.to(getattr(torch, recipe.weight_dtype)).train(), "cuda")


def _run(
    forward: Callable[..., Any], loss: LossFunction | None, *, input_ids: Tensor, labels: Tensor, **_others: Any
) -> Any:
    """Call a module with what it takes; its output has the loss."""
    takes = inspect.signature(forward).parameters
    named = {"labels": labels} if loss is None else {}
    output = forward(input_ids=input_ids, **named) if "input_ids" in takes else forward(input_ids, **named)
    if loss is not None:
        return SimpleNamespace(loss=loss(output, labels), logits=None)
    if isinstance(output, Tensor):
        return SimpleNamespace(loss=output, logits=None)
    if isinstance(output, tuple):
        return SimpleNamespace(loss=output[0], logits=None)
    return SimpleNamespace(**output) if isinstance(output, dict) else output


def require_loss(model: nn.Module, loss: LossFunction | None) -> None:
    """Raise if it is unclear what the loss of a module is."""
    takes_labels = "labels" in inspect.signature(model.forward).parameters
    if loss is None and not takes_labels:
        raise RecipeError(
            f"{type(model).__name__}.forward takes no labels. Give `loss`, a function of its output and the labels."
        )


def require_covered(recipe: TrainingRecipe) -> None:
    """Raise for options that change a model of transformers, and not any module."""
    changed = {
        "checkpointing": recipe.checkpointing,
        "lora": recipe.lora is not None or recipe.qlora is not None,
        "liger": bool(recipe.kernels),
        "loss": recipe.loss is not Loss.HF,
        "packing": recipe.packing,
        "padding": recipe.padding > 0,
        "eval_batch": recipe.eval_batch is not None,
    }
    for option, given in changed.items():
        if given:
            raise UnsupportedError(
                f"estimate: {option} is not covered for {recipe.spec.name}, a module of your own. Leave it out, or"
                " build it into the module."
            )


def _digest(model: nn.Module, loss: LossFunction | None, own: OwnModule) -> str:
    """Changes with the module's tensors and attributes, and with the files of its classes and of the loss."""
    found = hashlib.sha256(own.pickled)
    items: set[Any] = {*(type(module) for module in model.modules()), *(() if loss is None else (loss,))}
    for file in sorted({file for item in items if (file := _file_of(item)) is not None}):
        found.update(file.read_bytes())
    return found.hexdigest()[:24]


def _file_of(item: Any) -> Path | None:
    with suppress(OSError, TypeError):
        if (file := Path(inspect.getfile(item))).is_file():
            return file
    return None


def _pickler(file: io.BytesIO) -> pickle.Pickler:
    base: Any = pickle.Pickler
    if find_spec("cloudpickle") is not None:
        import cloudpickle  # type: ignore[import-not-found, unused-ignore]

        base = cloudpickle.CloudPickler
    numbers: dict[int, int] = {}

    class _Shapes(base):  # type: ignore[misc]
        """Pickles what a tensor is, and not what is in it; a tensor that has two names stays one."""

        def persistent_id(self, item: Any) -> Any:
            if not isinstance(item, Tensor):
                return None
            trained = item.requires_grad if isinstance(item, nn.Parameter) else None
            return numbers.setdefault(id(item), len(numbers)), tuple(item.shape), item.dtype, trained

    return _Shapes(file)


class _Unpickler(pickle.Unpickler):
    """Makes the tensors on the simulated GPU."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, known: Any) -> Tensor:
        """A tensor of the shape."""
        number, shape, dtype, trained = known
        if number not in self._made:
            made = torch.empty(shape, dtype=dtype, device=GPU)
            self._made[number] = made if trained is None else nn.Parameter(made, requires_grad=trained)
        return self._made[number]
