"""torchtitan's activation checkpointing: of whole layers, of every n-th layer, or all but chosen operators."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ligerprof.models import ModelSpec
from ligerprof.recipe.configs.rows import Row, ignored, is_off, part_of, words
from ligerprof.recipe.configs.settings import ROUTER, KeptOutputs, Lacking, Reading, Reason, Setting
from ligerprof.text import short_repr
from ligerprof.torch_memory.saved_tensors import shapes_text

# the key under which a converted object carries the name of its class
CLASS = "class"
SECTION = "activation_checkpoint"
_BUDGET = Lacking(what="checkpointing within a memory budget", setting=Setting.CHECKPOINTING)
# selective_ac_option of a file that names none
_EVERY_SECOND = "2"
# names until the end of 2025, and since
_SHAPE_KEYS = ("per_op_sac_force_recompute_mm_shapes_by_fqns", "force_recompute_mm_shapes_by_fqns")
_DEFAULT_SHAPES = ("moe.router.gate",)
# linear layers of torchtitan's decoder layers, with transformers' names
_LINEAR_LAYERS = {
    "attention.wq": "q_proj",
    "attention.wk": "k_proj",
    "attention.wv": "v_proj",
    "attention.wo": "o_proj",
    "attention.qkv_linear.wq": "q_proj",
    "attention.qkv_linear.wk": "k_proj",
    "attention.qkv_linear.wv": "v_proj",
    "attention.wq_a": "q_a_proj",
    "attention.wq_b": "q_b_proj",
    "attention.wkv_a": "kv_a_proj_with_mqa",
    "attention.wkv_b": "kv_b_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "moe.shared_experts.w1": "shared_experts.gate_proj",
    "moe.shared_experts.w2": "shared_experts.down_proj",
    "moe.shared_experts.w3": "shared_experts.up_proj",
    "moe.router.gate": ROUTER,
}

ROWS: Mapping[str, Row] = {
    "mode": words(
        Setting.CHECKPOINTING,
        {"none": False, "full": True, "selective": True, "memory_budget": _BUDGET},
        what="activation checkpointing",
    ),
    **part_of("checkpointing", f"{CLASS} selective_ac_option"),
    **part_of("products that are computed again", " ".join(_SHAPE_KEYS)),
    **ignored(
        Reason.OTHER_METHOD,
        "memory_budget visualize_memory_budget_pareto preserve_rng_state determinism_check debug early_stop",
    ),
}


def set_from_file(reading: Reading, checkpointing: Mapping[str, Any]) -> None:
    """Checkpointing of a TOML file: selective by default, of every n-th layer or by operator."""
    if checkpointing.get("mode", "selective") != "selective":
        return
    key, option = f"{SECTION}.selective_ac_option", str(checkpointing.get("selective_ac_option", _EVERY_SECOND))
    if option == "op":
        _set_policy(reading, key, checkpointing)
    elif not option.isdecimal():
        reading.lack(key, Lacking(what=f"the option {short_repr(option)}", setting=Setting.SELECTIVE))
    else:
        # 0 checkpoints every layer
        every = max(int(option), 1)
        reading.set(key, {Setting.CHECKPOINT_EVERY: every})
        if every > 1:
            reading.assumed.append(
                "the first of each group of layers is checkpointed, as in transformers; torchtitan's is the last"
            )


def set_from_class(reading: Reading, checkpointing: Mapping[str, Any]) -> None:
    """Checkpointing of a function's configuration, whose class names it."""
    kind, kinds = checkpointing.get(CLASS, "NoneType"), {"FullAC": True, "NoneType": False}
    if kind in kinds:
        reading.set(SECTION, {Setting.CHECKPOINTING: kinds[kind]})
    elif kind == "SelectiveAC":
        reading.settings.pop(Setting.CHECKPOINTING, None)
        _set_policy(reading, SECTION, checkpointing)
    elif kind == "MemoryBudgetAC":
        reading.lack(SECTION, _BUDGET)
    else:
        reading.lack(SECTION, Lacking(what=f"checkpointing by {kind}", setting=Setting.CHECKPOINTING))


def _set_policy(reading: Reading, key: str, checkpointing: Mapping[str, Any]) -> None:
    given = next((checkpointing[name] for name in _SHAPE_KEYS if name in checkpointing), _DEFAULT_SHAPES)
    names = [str(name) for name in given] if isinstance(given, (list, tuple)) else []
    kept = KeptOutputs(policy="torchtitan", recomputed=tuple(dict.fromkeys(_layers_named(names))))
    reading.set(key, {Setting.CHECKPOINTING: True, Setting.SELECTIVE: kept}, words="selective torchtitan")
    for name in names:
        if not any(_layers_named([name])):
            reading.assumed.append(f"no product of a decoder layer is known as {short_repr(name)}: none is left out")
    if is_off(checkpointing.get("early_stop")):
        reading.assumed.append(
            "recomputation stops at the last saved tensor; torchtitan's goes on (early_stop is off) and frees kept"
            " outputs a little earlier"
        )


def _layers_named(names: Sequence[str]) -> Iterator[str]:
    """The linear layers that torchtitan finds by parts of their names."""
    for path, layer in _LINEAR_LAYERS.items():
        if any(name in f"layers.0.{path}" for name in names):
            yield layer


def selective_policy(kept: Any, spec: ModelSpec) -> str | None:
    """The policy of selective checkpointing, with the shapes of the products that it does not keep."""
    if not isinstance(kept, KeptOutputs):
        return None if kept is None else str(kept)
    mixture = spec.architecture.mlp.experts
    routers = () if mixture is None or ROUTER not in kept.recomputed else (mixture.router,)
    names = (*(name for name in kept.recomputed if name != ROUTER), *routers)
    ends = tuple(f".{name}.weight" for name in names)
    matrices = (item for item in spec.parameters if len(item.shape) == 2 and item.name.endswith(ends))
    return kept.policy + shapes_text(frozenset((item.shape[1], item.shape[0]) for item in matrices))
