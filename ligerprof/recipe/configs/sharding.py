"""FSDP's settings, as TrainingArguments, accelerate and axolotl write them: with or without the prefix `fsdp_`."""

from collections.abc import Mapping
from typing import Any

from ligerprof.recipe.configs.framework import Framework
from ligerprof.recipe.configs.rows import (
    BadValueError,
    Row,
    ignored_keys,
    is_off,
    lacking,
    part_of,
    truth,
    turned_on,
    whole_number,
)
from ligerprof.recipe.configs.settings import Found, Ignored, Lacking, Outcome, Reading, Reason, Sets, Setting

# names and numbers of torch.distributed.fsdp.StateDictType
_WHOLE, _SHARDS = ("FULL_STATE_DICT", "1"), ("LOCAL_STATE_DICT", "SHARDED_STATE_DICT", "2", "3")
_STRATEGY_KEYS, _KEEPS_WEIGHTS = ("fsdp_sharding_strategy", "sharding_strategy"), ("SHARD_GRAD_OP", "2")
_RESHARDS = {"full_shard": True, "hybrid_shard": True, "shard_grad_op": False, "hybrid_shard_zero2": False}


def _read_reshard(value: Any) -> Outcome:
    word = str(value).strip().lower()
    return Sets(values={Setting.RESHARD: _RESHARDS[word] if word in _RESHARDS else truth(value)})


def _read_policy(value: Any) -> Outcome:
    if str(value).strip().upper() == "SIZE_BASED_WRAP":
        return Lacking(what="FSDP's wrapping of modules by size")
    return Sets(values={}, words="part of FSDP")


def _read_version(value: Any) -> Outcome:
    return Sets(values={}, words=f"version {whole_number(value, 1)} of FSDP")


def _is_whole(kind: Any) -> bool:
    """Whether a state dict of this type has whole weights."""
    word = str(kind).strip().upper()
    if word not in (*_WHOLE, *_SHARDS):
        raise BadValueError("not FULL_STATE_DICT, SHARDED_STATE_DICT or LOCAL_STATE_DICT")
    return word in _WHOLE


def _read_state_dict(value: Any) -> Outcome:
    if is_off(value):
        return Ignored(reason=Reason.UNSET)
    return Sets(values={}, words=f"saves {'the model whole' if _is_whole(value) else 'shards'}")


# of checkpoints, and axolotl's of the trained model
_STATE_DICT_KEYS = ("state_dict_type", "final_state_dict_type")
_KEYS: Mapping[str, Row] = {
    **ignored_keys("fsdp"),
    "version": Row(read=_read_version),
    "reshard_after_forward": Row(read=_read_reshard),
    "offload_params": turned_on({Setting.OFFLOAD: "all"}),
    "cpu_offload": turned_on({Setting.OFFLOAD: "all"}),
    "activation_checkpointing": turned_on({Setting.CHECKPOINTING: True, Setting.REENTRANT: False}),
    **part_of(
        "part of FSDP",
        "transformer_layer_cls_to_wrap sharding_strategy backward_prefetch backward_prefetch_policy forward_prefetch"
        " limit_all_gathers use_orig_params",
    ),
    "auto_wrap_policy": Row(read=_read_policy),
    **lacking("FSDP with ignored modules", "ignored_modules"),
    **lacking("a mixed-precision policy for FSDP", "mixed_precision_policy"),
    **lacking("checkpoints in host memory", "activation_checkpointing_offload activation_cpu_offload"),
    **lacking("torch_xla", "xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt"),
    "state_dict_type": Row(read=_read_state_dict),
    "final_state_dict_type": Row(read=_read_state_dict),
}
FSDP_ROWS: Mapping[str, Row] = {**_KEYS, **{f"fsdp_{name}": row for name, row in _KEYS.items()}}


def set_fsdp(reading: Reading, key: str, section: Any, *, version: Any, outer: Any = None) -> None:
    """Choose FSDP as the engine of a file.

    Args:
        key: the key that switches FSDP on.
        section: the value of `fsdp_config`.
        version: the framework's default version.
        outer: a version that the file has outside the section.
    """
    inner = section if isinstance(section, Mapping) else {}
    number = inner.get("fsdp_version") or inner.get("version") or outer or version
    # accelerate gathers and reduces in the same dtype (FullyShardedDataParallelPlugin.set_mixed_precision)
    settings = {Setting.WRAP: "accelerate", Setting.REDUCE_DTYPE: "bfloat16"}
    is_newer = str(number) in ("2", "2.0")
    reading.set(key, {Setting.ENGINE: "fsdp2" if is_newer else "fsdp1", **settings})
    strategy = next((inner[name] for name in _STRATEGY_KEYS if inner.get(name) is not None), "FULL_SHARD")
    if not is_newer and str(strategy).upper() in _KEEPS_WEIGHTS:
        # version 2 reads reshard_after_forward alone
        reading.settings.setdefault(Setting.RESHARD, Found(value=False, key=key, file=reading.file))
    kinds = [inner.get(f"{prefix}{name}") for prefix in ("", "fsdp_") for name in _STATE_DICT_KEYS]
    if given := [kind for kind in kinds if not is_off(kind)]:
        reading.settings[Setting.SAVE_WHOLE] = Found(value=any(map(_is_whole, given)), key=key, file=reading.file)


def _finish_fsdp(reading: Reading, values: Mapping[str, Any]) -> None:
    set_fsdp(reading, next(iter(values)), values, version=2)


# the file that `fsdp_config` of TrainingArguments names
FSDP = Framework(
    name="fsdp",
    title="the Trainer's settings of FSDP",
    rows=FSDP_ROWS,
    signature=frozenset(
        {"transformer_layer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap", "fsdp_version", "auto_wrap_policy"}
        | {"reshard_after_forward", "fsdp_reshard_after_forward", "backward_prefetch", "cpu_ram_efficient_loading"}
    ),
    is_complete=False,
    finish=_finish_fsdp,
)
