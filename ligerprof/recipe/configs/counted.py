"""Say what the figures of a file depend on most: GPUs, the dtype of the weights, and the length of sequences."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ligerprof.recipe.categories import Engine, Precision
from ligerprof.recipe.configs.settings import Found, Setting, default_key
from ligerprof.recipe.configs.trainer import TRANSFORMERS
from ligerprof.recipe.training import RECIPE_OPTIONS

_VERSION_4 = {Precision.BF16_AMP: Precision.AMP, Precision.FP16_AMP: Precision.AMP_FP16}


def counted(
    options: Mapping[str, Any], found: Callable[[Setting], Found | None], typed: Collection[str]
) -> Iterator[str]:
    """One sentence each on how many GPUs are counted, in which dtype the weights are, and how long sequences are.

    Args:
        options: values of recipe options.
        found: the value of a setting, and where it comes from.
        typed: the options of the command line.
    """
    yield _gpus(options.get("gpus", 1), found(Setting.GPUS), found(Setting.ENGINE))
    precision = Precision(options.get("precision", RECIPE_OPTIONS["precision"].default))
    if "precision" in typed:
        yield f"weights in {_dtype(precision)}: --precision {precision}"
    else:
        yield f"weights in {_dtype(precision)}: {_origin(precision, options.get('engine') == Engine.DEEPSPEED, found)}"
    if options.get("lengths") is None:
        length, source = options.get("seq", RECIPE_OPTIONS["seq"].default), found(Setting.SEQ)
        place = "no file sets it" if source is None else source.place
        yield f"every sequence is taken as full: {length:,} tokens ({place}; --lengths counts those of a data set)"


def _gpus(count: int, found: Found | None, engine: Found | None) -> str:
    words = f"{count} GPU{'s' if count > 1 else ''} counted"
    if found is not None:
        return f"{words}: {found.place}"
    if engine is not None and engine.value == Engine.TORCH:
        return f"{words}: {engine.place}"
    return f"{words}: no file says how many train (--gpus sets it, or the launcher's file as another --config)"


def _dtype(precision: Precision) -> str:
    return f"{precision.weight_dtype}{' with fp32 master copies' if precision.is_mixed else ''}"


def _origin(precision: Precision, is_deepspeed: bool, found: Callable[[Setting], Found | None]) -> str:
    """Where the dtype of the weights comes from, with the version of transformers if it depends on that."""
    loaded, computed = found(Setting.WEIGHTS), found(Setting.AUTOCAST)
    if is_deepspeed or loaded is None:
        return "no file sets it" if computed is None else computed.place
    if loaded.value != "checkpoint":
        return loaded.place
    if loaded.key == default_key(Setting.WEIGHTS, TRANSFORMERS.name):
        earlier = _VERSION_4.get(precision, Precision.FP32)
        return (
            "no file sets it, and transformers 5 loads the checkpoint's; transformers 4 loads float32"
            f" (--precision {earlier})"
        )
    return f"the checkpoint's, as {loaded.place}"
