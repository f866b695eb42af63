"""How a model is trained: one frozen recipe for every command, checked when it is made."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ligerprof.errors import NotBuiltError, RecipeError
from ligerprof.gpus import GpuSpec, find_gpu
from ligerprof.kernels.selection import select_kernels
from ligerprof.models import DEFAULT_MODEL, ModelSpec, load_model, spec_from_config
from ligerprof.recipe.categories import (
    Attention,
    Device,
    Engine,
    FlceBudget,
    Loss,
    Offload,
    Optimizer,
    Precision,
)
from ligerprof.recipe.deepspeed import deepspeed_config, read_deepspeed_config
from ligerprof.units import parse_bytes
from ligerprof.words import Word

_CATEGORIES: Mapping[str, type[Word]] = {
    "precision": Precision,
    "optimizer": Optimizer,
    "attention": Attention,
    "loss": Loss,
    "engine": Engine,
    "offload": Offload,
    "device": Device,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRecipe:
    """Everything that decides what a training step takes.

    Attributes:
        model: a catalog name, a config.json, a model folder, or a ModelSpec.
        batch: sequences in one micro-batch on one GPU.
        seq: tokens a sequence.
        grad_accum: micro-batches accumulated before the optimizer steps.
        padding: share of tokens that are padding; 0 passes no mask.
        liger: kernel set, as `--liger` takes it.
        provider: whose kernels.
        flce_budget: `lean`, `balanced`, `auto`, or bytes.
        optimizer: `default` becomes adamw-fused, or deepspeed-cpu-adam where the optimizer is offloaded.
        clip: largest gradient norm; None becomes 1.0 with DeepSpeed; 0 never clips.
        zero: ZeRO stage, 0 to 3.
        deepspeed_config: a JSON file of DeepSpeed's, or what it holds.
        memory_limit_bytes: limit on reserved bytes, or None.
        alloc_conf: PYTORCH_CUDA_ALLOC_CONF, or None.
        spec: the model described; set from `model`.
        kernels: the kernels that `liger` means for this model; set from `liger`.

    Raises:
        RecipeError: a value out of range, or options that do not go together.
    """

    model: str | ModelSpec = DEFAULT_MODEL
    batch: int = 4
    seq: int = 1024
    grad_accum: int = 1
    padding: float = 0.0
    liger: str = "none"
    provider: str = "ligerprof"
    flce_budget: FlceBudget | int = FlceBudget.BALANCED
    precision: Precision = Precision.AMP
    checkpointing: bool = True
    reentrant: bool = False
    optimizer: Optimizer = Optimizer.DEFAULT
    galore_rank: int = 128
    clip: float | None = None
    attention: Attention = Attention.SDPA
    loss: Loss = Loss.HF
    lora: int | None = None
    qlora: int | None = None
    engine: Engine = Engine.TORCH
    zero: int = 0
    offload: Offload = Offload.NONE
    nvme_path: str | None = None
    deepspeed_config: str | Mapping[str, Any] | None = None
    gpus: int = 1
    device: Device = Device.AUTO
    gpu: str = "h200"
    memory_limit_bytes: int | None = None
    alloc_conf: str | None = None
    warmup: int = 1
    repeats: int = 10
    spec: ModelSpec = field(init=False, repr=False)
    kernels: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        for name, category in _CATEGORIES.items():
            object.__setattr__(self, name, category.parse(getattr(self, name), name))
        if isinstance(self.flce_budget, str):
            object.__setattr__(self, "flce_budget", _named_budget(self.flce_budget))
        spec = self.model if isinstance(self.model, ModelSpec) else load_model(self.model)
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "kernels", select_kernels(self.liger, spec))
        if self.optimizer is Optimizer.DEFAULT:
            on_gpu = self.offload is Offload.NONE
            optimizer = Optimizer.ADAMW_FUSED if on_gpu else Optimizer.DEEPSPEED_CPU_ADAM
            object.__setattr__(self, "optimizer", optimizer)
        if self.clip is None and self.engine is Engine.DEEPSPEED:
            object.__setattr__(self, "clip", 1.0)
        if self.deepspeed_config is not None:
            object.__setattr__(self, "deepspeed_config", read_deepspeed_config(self.deepspeed_config))
        find_gpu(self.gpu)
        _check_ranges(self)
        _check_combinations(self)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.batch * self.seq

    @property
    def gpu_spec(self) -> GpuSpec:
        """The GPU that a simulation or a fit stands for."""
        return find_gpu(self.gpu)

    @property
    def autocast(self) -> str | None:
        """The dtype autocast computes in, `bfloat16` or `float16`, or None."""
        return self.precision.autocast

    @property
    def weight_dtype(self) -> str:
        """The dtype of the module's parameters, as torch names it."""
        return self.precision.weight_dtype

    @property
    def compute_dtype(self) -> str:
        """The dtype of matrix products, as torch names it."""
        return self.precision.compute_dtype

    @property
    def summary(self) -> str:
        """What is trained and how, in a line."""
        return ", ".join(
            (
                self.spec.name,
                f"{self.batch} x {self.seq} tokens",
                self.precision,
                "checkpointed" if self.checkpointing else "not checkpointed",
                self.optimizer,
                f"kernels {'+'.join(self.kernels)} ({self.provider})" if self.kernels else "no fused kernels",
            )
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back, also where the model's path is gone."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.init}
        values["model"] = self.spec.name
        return {**values, "model_config": self.spec.config, "kernels": list(self.kernels)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "TrainingRecipe":
        """Rebuild a recipe from `to_json`.

        Raises:
            RecipeError: a key that is no field, or a value that does not hold.
        """
        names = {item.name for item in dataclasses.fields(cls) if item.init}
        if unknown := set(values) - names - {"model_config", "kernels"}:
            raise RecipeError(f"unknown recipe keys: {', '.join(sorted(unknown))}. Was it written by a newer version?")
        chosen = {name: value for name, value in values.items() if name in names}
        if "model_config" in values:
            chosen["model"] = spec_from_config(values["model_config"], name=str(values.get("model", "model")))
        return cls(**chosen)


def _named_budget(word: str) -> FlceBudget:
    try:
        return FlceBudget(word)
    except ValueError:
        raise RecipeError(f"unknown flce budget {word!r}. Known: {', '.join(FlceBudget)}, or bytes.") from None


def parse_flce_budget(text: str) -> FlceBudget | int:
    """Read `--flce-budget`: lean, balanced, auto, or a size.

    Raises:
        RecipeError: neither.
    """
    return FlceBudget(text) if text in tuple(FlceBudget) else parse_bytes(text)


def _check_ranges(recipe: TrainingRecipe) -> None:
    for name in ("batch", "seq", "grad_accum", "galore_rank", "gpus", "repeats"):
        if getattr(recipe, name) < 1:
            raise RecipeError(f"{name} is {getattr(recipe, name)}. It is at least 1.")
    for name in ("lora", "qlora", "memory_limit_bytes"):
        value = getattr(recipe, name)
        if value is not None and value < 1:
            raise RecipeError(f"{name} is {value}. It is at least 1.")
    for wrong, message in _range_faults(recipe):
        if wrong:
            raise RecipeError(message)


def _check_combinations(recipe: TrainingRecipe) -> None:
    for wrong, message in (*_engine_conflicts(recipe), *_other_conflicts(recipe)):
        if wrong:
            raise RecipeError(message)
    if recipe.engine is Engine.DEEPSPEED:
        deepspeed_config(recipe)


def _range_faults(recipe: TrainingRecipe) -> Iterator[tuple[bool, str]]:
    spec, budget = recipe.spec, recipe.flce_budget
    yield recipe.warmup < 1, f"warmup is {recipe.warmup}. It is at least 1: the first step is not the steady one."
    yield not 0.0 <= recipe.padding < 1.0, f"padding is {recipe.padding}. It is a share from 0 up to but not 1."
    yield (recipe.clip or 0) < 0, f"clip is {recipe.clip}. It is a positive norm, or 0 to clip nothing."
    yield recipe.zero not in (0, 1, 2, 3), f"ZeRO stage {recipe.zero} does not exist. Choose 0, 1, 2 or 3."
    yield isinstance(budget, int) and budget < 1, f"the flce budget is {budget} bytes. Give a positive size."
    yield (
        not spec.rotary and recipe.seq > spec.max_positions,
        f"{spec.name} has {spec.max_positions} learned positions, seq is {recipe.seq}. Choose fewer tokens.",
    )


def _engine_conflicts(recipe: TrainingRecipe) -> Iterator[tuple[bool, str]]:
    deepspeed, mixed = recipe.engine is Engine.DEEPSPEED, recipe.precision.is_mixed
    precision, offload = recipe.precision, recipe.offload
    yield mixed and not deepspeed, f"precision {precision} is DeepSpeed's. Add --engine deepspeed, or choose amp."
    yield deepspeed and not mixed, f"engine deepspeed trains in mixed or mixed-fp16, not {precision}."
    yield recipe.zero > 0 and not deepspeed, f"--zero {recipe.zero} needs --engine deepspeed."
    yield offload is not Offload.NONE and not deepspeed, f"--offload {offload} needs --engine deepspeed."
    yield recipe.gpus > 1 and not deepspeed, f"--gpus {recipe.gpus} needs --engine deepspeed."
    yield (
        recipe.optimizer is Optimizer.DEEPSPEED_CPU_ADAM and offload is Offload.NONE,
        "deepspeed-cpu-adam works on an offloaded optimizer. Add --offload optimizer or all.",
    )
    yield offload.moves_parameters and recipe.zero != 3, f"--offload {offload} moves parameters: it needs --zero 3."
    yield offload is Offload.OPTIMIZER and recipe.zero == 0, "--offload optimizer needs --zero 1, 2 or 3."
    yield (offload is Offload.NVME) != (recipe.nvme_path is not None), "--offload nvme and --nvme-path go together."
    yield (
        deepspeed and recipe.optimizer is Optimizer.NONE,
        "engine deepspeed needs an optimizer. Choose another --optimizer.",
    )
    yield (
        recipe.deepspeed_config is not None and not deepspeed,
        "--deepspeed-config needs --engine deepspeed.",
    )


def _other_conflicts(recipe: TrainingRecipe) -> Iterator[tuple[bool, str]]:
    lost_loss = recipe.loss is not Loss.HF and bool({"ce", "flce"} & set(recipe.kernels))
    nvme = recipe.nvme_path
    yield recipe.lora is not None and recipe.qlora is not None, "--lora and --qlora exclude each other. Give one."
    yield recipe.reentrant and not recipe.checkpointing, "--reentrant does not go with --no-checkpointing."
    yield lost_loss, f"--loss {recipe.loss} and the kernel ce or flce replace the same loss. Choose one."
    yield nvme is not None and not Path(nvme).is_dir(), f"{nvme}: no such folder. --nvme-path names one."


def require_built(recipe: TrainingRecipe, *, command: str) -> None:
    """Refuse what this version cannot carry out in a run, in one line.

    Raises:
        NotBuiltError: names the first option that is not built yet.
    """
    if recipe.engine is Engine.DEEPSPEED and command == "simulate":
        raise NotBuiltError(
            f"{command}: the simulator does not cover --engine deepspeed. Use `ligerprof estimate`, which has its"
            " closed form, or a GPU."
        )
    if recipe.attention is Attention.FLASH:
        raise NotBuiltError(f"{command}: --attention flash is not built yet; use sdpa.")
