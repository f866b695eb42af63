"""The options of a recipe that name the model and the size of its micro-batches."""

from dataclasses import dataclass, replace

from ligerprof.models import DEFAULT_MODEL, ModelSpec, load_model
from ligerprof.recipe.categories import ExpertsImplementation
from ligerprof.recipe.options import Group, Options, option
from ligerprof.recipe.routing import UNIFORM, canonical_routing


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """The model, the micro-batch, and how tokens choose experts."""

    model: str | ModelSpec = option(
        Group.MODEL,
        "A name or hub id from `ligerprof models` or the local Hugging Face cache, a config.json, or a model folder.",
        default=DEFAULT_MODEL,
        metavar="NAME|PATH",
    )
    like: str | None = option(
        Group.MODEL,
        "A known model whose architecture and sizes stand in where the model's name is unknown, as a fine-tune's.",
        metavar="NAME|PATH",
    )
    batch: int = option(Group.MODEL, "Sequences per micro-batch and GPU.", default=4, minimum=1)
    seq: int = option(Group.MODEL, "Tokens per sequence.", default=1024, minimum=1)
    grad_accum: int = option(Group.MODEL, "Micro-batches accumulated before the optimizer steps.", default=1, minimum=1)
    padding: float = option(
        Group.MODEL,
        "Share of tokens that are padding; 0 passes no mask.",
        default=0.0,
        minimum=0,
        below=1,
        requirement="a share from 0 up to, but not including, 1",
    )
    packing: bool = option(
        Group.MODEL,
        "Train on one row of batch x seq tokens without padding, in which positions restart with each document.",
        default=False,
        negatable=True,
    )
    eval_batch: int | None = option(
        Group.MODEL, "Sequences per evaluation batch; without it, nothing is evaluated.", minimum=1
    )
    eval_follows_batch: bool = option(
        Group.MODEL, "Evaluate with as many sequences as --batch, also where a search changes that.", default=False
    )
    experts: ExpertsImplementation | None = option(
        Group.MODEL,
        "Implementation of a mixture of experts, as transformers names it: all experts in one product, or one after"
        " another.",
        default_text="that of the config, else grouped_mm",
    )
    routing: str = option(
        Group.MODEL,
        "How tokens choose experts: evenly, all the same ones, or in the shares of a file. It matters if experts run"
        " one after another.",
        default=UNIFORM,
        metavar="uniform|worst|FILE",
        canonical=canonical_routing,
        has_commas=True,
    )


def described(model: str | ModelSpec, like: str | None) -> ModelSpec:
    """The spec of a recipe's model; `like` stands in for an unknown name, and is in JSON next to its sizes."""
    if isinstance(model, str):
        return load_model(model, like)
    return model if model.like == like else replace(model, like=like)
