"""The options of a recipe, written once for every command that takes one; others are in common_options."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from ligerprof.cli.common_options import (
    dry_run_option,
    folder_option,
    force_option,
    json_option,
    or_usage_error,
    size_option,
    timeout_option,
    top_option,
)
from ligerprof.gpus import GPUS
from ligerprof.models import DEFAULT_MODEL
from ligerprof.recipe import training as recipes
from ligerprof.recipe.categories import Attention, Device, Engine, Loss, Offload, Optimizer, Precision
from ligerprof.words import Word

__all__ = [
    "dry_run_option",
    "folder_option",
    "force_option",
    "json_option",
    "recipe_options",
    "recipe_parameters",
    "size_option",
    "timeout_option",
    "top_option",
    "trace_option",
]

Command = TypeVar("Command", bound=Callable[..., Any])
_DEFAULTS = {item.name: item.default for item in dataclasses.fields(recipes.TrainingRecipe)}


def _read_budget(_ctx: click.Context, _param: click.Parameter, value: str) -> str | int:
    return or_usage_error(recipes.parse_flce_budget, value)


def _choice(flag: str, words: tuple[Word, ...], text: str, default: str | None) -> Callable[[Command], Command]:
    return click.option(
        flag,
        type=click.Choice([str(word) for word in words]),
        default=default,
        show_default=default is not None,
        help=text,
    )


def _count(flag: str, name: str, text: str) -> Callable[[Command], Command]:
    default = _DEFAULTS[name]
    return click.option(flag, name, type=click.IntRange(min=1), default=default, show_default=True, help=text)


def _recipe_options() -> tuple[Callable[[Any], Any], ...]:
    return (
        click.option(
            "--model",
            default=DEFAULT_MODEL,
            show_default=True,
            metavar="NAME|PATH",
            help="A name from `ligerprof models`, a config.json, or a model folder.",
        ),
        _count("--batch", "batch", "Sequences in a micro-batch on one GPU."),
        _count("--seq", "seq", "Tokens a sequence."),
        _count("--grad-accum", "grad_accum", "Micro-batches accumulated before the optimizer steps."),
        click.option(
            "--padding",
            type=click.FloatRange(0, 1, max_open=True),
            default=0.0,
            show_default=True,
            help="Share of tokens that are padding; 0 passes no mask.",
        ),
        click.option(
            "--liger",
            default="none",
            show_default=True,
            metavar="SET",
            help="Fused kernels: none, all, no-flce, or names joined by '+' (see `ligerprof kernels`).",
        ),
        click.option(
            "--provider",
            default="ligerprof",
            show_default=True,
            help="Whose kernels: ligerprof, torch, liger, …",
        ),
        click.option(
            "--flce-budget",
            callback=_read_budget,
            default="balanced",
            show_default=True,
            metavar="lean|balanced|auto|SIZE",
            help="Workspace of the fused loss.",
        ),
        _choice("--precision", Precision.choices(), "Dtypes of weights, gradients, moments and products.", "amp"),
        click.option("--checkpointing/--no-checkpointing", default=True, show_default=True, help="Recompute layers."),
        click.option("--reentrant", is_flag=True, help="Checkpoint the older, reentrant way."),
        _choice(
            "--optimizer",
            Optimizer.choices(),
            "Default: adamw-fused; deepspeed-cpu-adam where the optimizer is offloaded.",
            None,
        ),
        _count("--galore-rank", "galore_rank", "Rank of GaLore's projections."),
        click.option(
            "--clip",
            type=click.FloatRange(min=0),
            help="Largest gradient norm. Default: none; 1.0 with deepspeed.",
        ),
        _choice("--attention", Attention.choices(), "Attention implementation.", "sdpa"),
        _choice("--loss", Loss.choices(), "transformers' loss today, or as version 4.45 had it.", "hf"),
        click.option("--lora", type=click.IntRange(min=1), metavar="R", help="LoRA of rank R on the linear layers."),
        click.option("--qlora", type=click.IntRange(min=1), metavar="R", help="The same over 4-bit weights."),
        _choice("--engine", Engine.choices(), "What trains.", "torch"),
        click.option("--zero", type=click.IntRange(0, 3), default=0, show_default=True, help="ZeRO stage."),
        _choice("--offload", Offload.choices(), "What DeepSpeed keeps in host memory.", "none"),
        click.option("--nvme-path", metavar="DIR", help="Folder on the disk that --offload nvme uses."),
        click.option("--deepspeed-config", metavar="FILE", help="DeepSpeed's JSON, for what no option here decides."),
        _count("--gpus", "gpus", "GPUs that train together."),
        _choice("--device", Device.choices(), "Where the step runs.", "auto"),
        click.option(
            "--gpu",
            type=click.Choice(tuple(GPUS)),
            default="h200",
            show_default=True,
            help="GPU that a simulation or an estimate stands for.",
        ),
        size_option("--memory-limit", "memory_limit_bytes", "Limit on reserved bytes, such as 24GiB."),
        click.option("--alloc-conf", metavar="TEXT", help="PYTORCH_CUDA_ALLOC_CONF of the run."),
        _count("--warmup", "warmup", "Steps before the profiled one."),
        _count("--repeats", "repeats", "Steps that are timed."),
    )


def recipe_parameters() -> tuple[click.Option, ...]:
    """The options of a recipe as click holds them, for commands that take several values each."""

    def bare() -> None:
        pass

    for option in reversed(_recipe_options()):
        option(bare)
    parameters: list[click.Option] = bare.__click_params__  # type: ignore[attr-defined]
    return tuple(reversed(parameters))


def recipe_options(function: Command) -> Command:
    """Add every option of a recipe; the command gets one argument `recipe: TrainingRecipe`."""
    options = _recipe_options()

    @functools.wraps(function)
    def with_recipe(**arguments: Any) -> Any:
        names = [parameter.name for parameter in wrapped_parameters]
        values = {name: arguments.pop(name) for name in names if name is not None}
        if values["optimizer"] is None:
            values["optimizer"] = "default"
        return function(recipe=recipes.TrainingRecipe(**values), **arguments)

    decorated: Any = with_recipe
    for option in reversed(options):
        decorated = option(decorated)
    wrapped_parameters: list[click.Parameter] = list(reversed(decorated.__click_params__))[: len(options)]
    return decorated  # type: ignore[no-any-return]


def trace_option(*, default: bool) -> Callable[[Command], Command]:
    """Whether a measured step is profiled once more for TensorBoard; passes `trace: bool`."""
    text = "Profile two more steps on a GPU for TensorBoard."
    return click.option("--trace/--no-trace", default=default, show_default=True, help=text)
