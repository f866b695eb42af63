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
from ligerprof.recipe.deepspeed import deepspeed_config, read_deepspeed_config
from ligerprof.units import parse_bytes

PRECISIONS = ("amp", "amp-fp16", "mixed", "mixed-fp16", "bf16", "fp16", "fp32")
OPTIMIZERS = ("adamw-fused", "adamw-foreach", "adamw-8bit", "galore", "sgd", "none", "deepspeed-cpu-adam")
ATTENTIONS = ("sdpa", "eager", "flash")
LOSSES = ("hf", "hf-4.45")
ENGINES = ("torch", "deepspeed")
OFFLOADS = ("none", "optimizer", "all", "nvme")
DEVICES = ("auto", "cuda", "simulated")
FLCE_BUDGETS = ("lean", "balanced", "auto")


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
    flce_budget: str | int = "balanced"
    precision: str = "amp"
    checkpointing: bool = True
    reentrant: bool = False
    optimizer: str = "default"
    galore_rank: int = 128
    clip: float | None = None
    attention: str = "sdpa"
    loss: str = "hf"
    lora: int | None = None
    qlora: int | None = None
    engine: str = "torch"
    zero: int = 0
    offload: str = "none"
    nvme_path: str | None = None
    deepspeed_config: str | Mapping[str, Any] | None = None
    gpus: int = 1
    device: str = "auto"
    gpu: str = "h200"
    memory_limit_bytes: int | None = None
    alloc_conf: str | None = None
    warmup: int = 1
    repeats: int = 10
    spec: ModelSpec = field(init=False, repr=False)
    kernels: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.model if isinstance(self.model, ModelSpec) else load_model(self.model)
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "kernels", select_kernels(self.liger, spec))
        if self.optimizer == "default":
            optimizer = "adamw-fused" if self.offload == "none" else "deepspeed-cpu-adam"
            object.__setattr__(self, "optimizer", optimizer)
        if self.clip is None and self.engine == "deepspeed":
            object.__setattr__(self, "clip", 1.0)
        if self.deepspeed_config is not None:
            object.__setattr__(self, "deepspeed_config", read_deepspeed_config(self.deepspeed_config))
        _check_words(self)
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
        return {"amp": "bfloat16", "amp-fp16": "float16"}.get(self.precision)

    @property
    def weight_dtype(self) -> str:
        """The dtype of the module's parameters, as torch names it."""
        if self.precision in ("fp32", "amp", "amp-fp16"):
            return "float32"
        return "float16" if self.precision in ("fp16", "mixed-fp16") else "bfloat16"

    @property
    def compute_dtype(self) -> str:
        """The dtype of matrix products, as torch names it."""
        return self.autocast or self.weight_dtype

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


def parse_flce_budget(text: str) -> str | int:
    """Read `--flce-budget`: lean, balanced, auto, or a size.

    Raises:
        RecipeError: neither.
    """
    return text if text in FLCE_BUDGETS else parse_bytes(text)


def _check_words(recipe: TrainingRecipe) -> None:
    for name, known in (
        ("precision", PRECISIONS),
        ("optimizer", OPTIMIZERS),
        ("attention", ATTENTIONS),
        ("loss", LOSSES),
        ("engine", ENGINES),
        ("offload", OFFLOADS),
        ("device", DEVICES),
    ):
        if getattr(recipe, name) not in known:
            raise RecipeError(f"unknown {name} {getattr(recipe, name)!r}. Known: {', '.join(known)}.")
    if isinstance(recipe.flce_budget, str) and recipe.flce_budget not in FLCE_BUDGETS:
        raise RecipeError(f"unknown flce budget {recipe.flce_budget!r}. Known: {', '.join(FLCE_BUDGETS)}, or bytes.")
    find_gpu(recipe.gpu)


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
    if recipe.engine == "deepspeed":
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
    deepspeed, mixed = recipe.engine == "deepspeed", recipe.precision.startswith("mixed")
    precision, offload = recipe.precision, recipe.offload
    yield mixed and not deepspeed, f"precision {precision} is DeepSpeed's. Add --engine deepspeed, or choose amp."
    yield deepspeed and not mixed, f"engine deepspeed trains in mixed or mixed-fp16, not {precision}."
    yield recipe.zero > 0 and not deepspeed, f"--zero {recipe.zero} needs --engine deepspeed."
    yield offload != "none" and not deepspeed, f"--offload {offload} needs --engine deepspeed."
    yield recipe.gpus > 1 and not deepspeed, f"--gpus {recipe.gpus} needs --engine deepspeed."
    yield (
        recipe.optimizer == "deepspeed-cpu-adam" and offload == "none",
        "deepspeed-cpu-adam works on an offloaded optimizer. Add --offload optimizer or all.",
    )
    yield offload in ("all", "nvme") and recipe.zero != 3, f"--offload {offload} moves parameters: it needs --zero 3."
    yield offload == "optimizer" and recipe.zero == 0, "--offload optimizer needs --zero 1, 2 or 3."
    yield (offload == "nvme") != (recipe.nvme_path is not None), "--offload nvme and --nvme-path go together."
    yield deepspeed and recipe.optimizer == "none", "engine deepspeed needs an optimizer. Choose another --optimizer."
    yield (
        recipe.deepspeed_config is not None and not deepspeed,
        "--deepspeed-config needs --engine deepspeed.",
    )


def _other_conflicts(recipe: TrainingRecipe) -> Iterator[tuple[bool, str]]:
    lost_loss = recipe.loss != "hf" and bool({"ce", "flce"} & set(recipe.kernels))
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
    if recipe.engine == "deepspeed" and command == "simulate":
        raise NotBuiltError(
            f"{command}: the simulator does not cover --engine deepspeed. Use `ligerprof estimate`, which has its"
            " closed form, or a GPU."
        )
    if recipe.attention == "flash":
        raise NotBuiltError(f"{command}: --attention flash is not built yet; use sdpa.")
