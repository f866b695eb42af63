"""The recipe: what is trained and how the step is run, in one frozen object for every command."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.models import spec_from_config
from ligerprof.recipe.categories import Axis, Engine
from ligerprof.recipe.conflicts import require_compatible
from ligerprof.recipe.deepspeed import deepspeed_config, read_deepspeed_config
from ligerprof.recipe.options import options_of
from ligerprof.recipe.training_options import RunOptions, TrainingOptions


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe(RunOptions, TrainingOptions):
    """A training step: what it allocates, where it runs and how often; raises RecipeError for options in conflict."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_follows_batch:
            self._settle("eval_batch", self.batch)
        require_compatible(self)
        if self.engine is Engine.DDP:
            # it builds its buckets anew in the second step, so the third is the first steady one
            self._settle("warmup", max(self.warmup, 2))
        if self.deepspeed_config is not None:
            self._settle("deepspeed_config", read_deepspeed_config(self.deepspeed_config))
        if self.engine is Engine.DEEPSPEED:
            deepspeed_config(self)

    @property
    def training(self) -> TrainingOptions:
        """What is trained, without how the step is run."""
        values = {name: getattr(self, name) for name in options_of(TrainingOptions)}
        return TrainingOptions(**{**values, "model": self.spec})

    @property
    def summary(self) -> str:
        """What is trained and how, in one line."""
        return ", ".join(
            (
                self.spec.name if self.like is None else f"{self.spec.name} (sizes of {self.like})",
                f"{self.batch} x {self.seq} tokens" + (" packed" if self.packing else ""),
                self.precision,
                *self._engine_words(),
                *self._adapter_words(),
                self.checkpointing_words,
                *(("compiled",) if self.compile else ()),
                self.optimizer,
                f"kernels {'+'.join(self.kernels)} ({self.provider_names})" if self.kernels else "no fused kernels",
            )
        )

    def _engine_words(self) -> tuple[str, ...]:
        """The engine and its GPUs; nothing for one GPU in plain torch."""
        if self.engine is Engine.TORCH:
            return ()
        zero = f" ZeRO-{self.zero}" if self.engine is Engine.DEEPSPEED else ""
        return (f"{self.engine}{zero} on {self.gpus} GPU{'s' if self.gpus > 1 else ''}",)

    @property
    def checkpointing_words(self) -> str:
        """Which layers are checkpointed, and what they keep."""
        if not self.checkpointing:
            return "not checkpointed"
        layers = "" if self.checkpoint_every == 1 else f"1 of {self.checkpoint_every} layers "
        if self.selective is not None and "*" in self.selective:
            return f"checkpointed by layer ({self.selective.replace(',', ', ')})"
        if self.selective is None:
            return f"{layers}checkpointed"
        name = self.selective if "+" not in self.selective else "own list of operators"
        return f"{layers}selectively checkpointed ({name})"

    def _adapter_words(self) -> tuple[str, ...]:
        """The adapters and the format of the weights below them; nothing without adapters."""
        rank = self.lora or self.qlora
        if rank is None:
            return ()
        over = "" if self.packed_bits is None else f" over {self.packed_bits}-bit weights"
        dropout = f" with dropout {self.lora_dropout:g}" if self.lora_dropout else ""
        return (f"{'DoRA' if self.dora else 'LoRA'} {rank}{over}{dropout}",)

    @property
    def evaluation(self) -> "TrainingRecipe | None":
        """The recipe of an evaluation batch, where nothing is recomputed or dropped; None without evaluation."""
        if self.eval_batch is None:
            return None
        return dataclasses.replace(
            self,
            batch=self.eval_batch,
            eval_batch=None,
            eval_follows_batch=False,
            grad_accum=1,
            checkpointing=False,
            reentrant=False,
            checkpoint_every=1,
            selective=None,
            activation_offload=False,
            lora_dropout=0.0,
        )

    def resized(self, axis: Axis, size: int) -> "TrainingRecipe":
        """The recipe with another batch or sequence."""
        changed: dict[str, Any] = {axis.value: size}
        return dataclasses.replace(self, **changed)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back, also after the model's folder is gone."""
        values = {name: getattr(self, name) for name in RECIPE_OPTIONS}
        values["model"] = self.spec.name
        return {**values, "model_config": self.spec.config, "kernels": list(self.kernels)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "TrainingRecipe":
        """Rebuild a recipe from `to_json`; raises RecipeError for an unknown key, or a value that is not allowed."""
        if unknown := set(values) - set(RECIPE_OPTIONS) - {"model_config", "kernels"}:
            raise RecipeError(f"unknown recipe keys: {', '.join(sorted(unknown))}. Was it written by a newer version?")
        chosen = {name: value for name, value in values.items() if name in RECIPE_OPTIONS}
        if "model_config" in values:
            chosen["model"] = spec_from_config(values["model_config"], name=str(values.get("model", "model")))
        return cls(**chosen)


# every option of a recipe by its field, which is also its JSON key
RECIPE_OPTIONS = options_of(TrainingRecipe)
