"""torchtitan: TOML files of versions up to 0.2, and the functions that newer versions have in their place."""

import dataclasses
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any

from ligerprof.errors import MissingDependencyError, RecipeError
from ligerprof.models import ModelSpec
from ligerprof.recipe.categories import Precision
from ligerprof.recipe.configs import rows, shared
from ligerprof.recipe.configs.settings import OTHER_TRAINING, ROUTER, KeptOutputs, Lacking, LeftOut, Reading, Setting
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.text import error_line, printable, short_repr
from ligerprof.torch_memory.chunked_losses import TITAN_CHUNKS
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

CHECKPOINTING_ROWS: Mapping[str, rows.Row] = {
    **rows.ignored_keys("torchtitan", "activation_checkpoint"),
    "mode": rows.words(
        Setting.CHECKPOINTING,
        {"none": False, "full": True, "selective": True, "memory_budget": _BUDGET},
        what="activation checkpointing",
    ),
    **rows.part_of("checkpointing", f"{CLASS} selective_ac_option"),
    **rows.part_of("products that are computed again", " ".join(_SHAPE_KEYS)),
}


def set_from_file(reading: Reading, checkpointing: Mapping[str, Any]) -> None:
    """Checkpointing of a TOML file: selective by default, of every n-th layer or by operator."""
    if checkpointing.get("mode", "selective") != "selective":
        return
    key, option = f"{SECTION}.selective_ac_option", str(checkpointing.get("selective_ac_option", _EVERY_SECOND))
    if option == "op":
        _set_policy(reading, key, checkpointing)
    elif not option.isdecimal():
        reading.lack(key, f"the option {short_repr(option)}", setting=Setting.SELECTIVE)
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
        reading.note(SECTION, None, _BUDGET)
    else:
        reading.lack(SECTION, f"checkpointing by {kind}", setting=Setting.CHECKPOINTING)


def _set_policy(reading: Reading, key: str, checkpointing: Mapping[str, Any]) -> None:
    given = next((checkpointing[name] for name in _SHAPE_KEYS if name in checkpointing), _DEFAULT_SHAPES)
    names = [str(name) for name in given] if isinstance(given, (list, tuple)) else []
    kept = KeptOutputs(policy="torchtitan", recomputed=tuple(dict.fromkeys(_layers_named(names))))
    reading.set(key, {Setting.CHECKPOINTING: True, Setting.SELECTIVE: kept}, words="selective torchtitan")
    for name in names:
        if not any(_layers_named([name])):
            reading.assumed.append(f"no product of a decoder layer is known as {short_repr(name)}: none is left out")
    if not rows.is_on(checkpointing, "early_stop"):
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
    router = spec.architecture.router
    routers = () if router is None or ROUTER not in kept.recomputed else (router,)
    names = (*(name for name in kept.recomputed if name != ROUTER), *routers)
    ends = tuple(f".{name}.weight" for name in names)
    matrices = (item for item in spec.parameters if len(item.shape) == 2 and item.name.endswith(ends))
    return kept.policy + shapes_text(frozenset((item.shape[1], item.shape[0]) for item in matrices))


NAME = "torchtitan"
_MOST_VALUES = 50_000
_DEEPEST = 30
_PLAIN_LOSS = "CrossEntropyLoss"
# the second is the name of 2026's first half
_CHUNKED_LOSSES = ("ChunkedLossWrapper", "ChunkedCELoss")
_AUTOCAST = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}

# flavors that the catalog names without their size
_MODELS = {"deepseek_v3-671B": "deepseek-v3"}
_TRAINING = {
    **rows.ignored_keys("torchtitan", "training"),
    **rows.each("local_batch_size batch_size", rows.count(Setting.BATCH)),
    **rows.each("seq_len max_context_length", rows.count(Setting.SEQ)),
    # a key that flame, built on torchtitan, adds
    "gradient_accumulation_steps": rows.count(Setting.GRAD_ACCUM),
    "max_norm": rows.number(Setting.CLIP),
    **rows.part_of("tokens of a micro-batch", "num_tokens_per_microbatch_per_dp_rank num_tokens_per_train_step"),
    **rows.part_of("batch of all GPUs", "global_batch_size"),
    "dtype": rows.words(Setting.WEIGHTS, {"float32": "float32", "bfloat16": "bfloat16"}, what="weights in"),
    "mixed_precision_param": rows.words(Setting.AUTOCAST, _AUTOCAST, what="autocast to"),
    "mixed_precision_reduce": rows.words(
        Setting.REDUCE_DTYPE, {"float32": "float32", "bfloat16": "bfloat16"}, what="reduction in"
    ),
    "enable_cpu_offload": rows.turned_on({Setting.OFFLOAD: "all"}),
    "compile": rows.turned_on({Setting.COMPILE: True}),
    "disable_cuda_graphs": rows.Row(
        read=lambda value: (
            LeftOut(what="the memory that CUDA graphs keep for themselves") if rows.is_off(value) else rows.UNSET
        )
    ),
    **rows.lacking("float8 layers", "fp8_linear enable_fp8_linear"),
    **rows.lacking("tensor parallelism", "sequence_parallel_degree", harmless=(1, -1)),
}
_PARALLELISM = {
    **rows.ignored_keys("torchtitan", "parallelism"),
    **rows.part_of("data parallelism", "data_parallel_replicate_degree data_parallel_shard_degree"),
    **rows.part_of("part of FSDP", "fsdp_reshard_after_forward enable_fsdp_symm_mem"),
    **rows.parallelism(tensor="tensor_parallel_degree", pipeline="pipeline_parallel_degree"),
    **rows.parallelism(context="context_parallel_degree"),
    **rows.parallelism(expert="expert_parallel_degree expert_tensor_parallel_degree"),
    **rows.lacking("compiled autograd", "enable_compiled_autograd"),
}
_OPTIMIZER = {
    **rows.ignored_keys("torchtitan", "optimizer"),
    "implementation": rows.words(
        Setting.OPTIMIZER,
        {
            "fused": "adamw-fused",
            "foreach": "adamw-foreach",
            "for-loop": "adamw",
            "fused_opt_states_bf16": "adamw-bf16",
        },
        what="optimizer",
    ),
    "name": rows.words(Setting.OPTIMIZER, {"adamw": "adamw-fused", "adam": "adamw-fused"}, what="optimizer"),
    **rows.part_of("optimizer", "param_groups optimizer_factory_kwargs_by_name"),
    **rows.lacking("optimizer steps in the backward pass", "early_step_in_backward"),
}
_ROWS: Mapping[str, rows.Row] = {
    # the oldest versions have the degrees of parallelism here
    **rows.ignored_keys("torchtitan"),
    "training": rows.section({**_PARALLELISM, **_TRAINING, **rows.part_of("data parallelism", "data_parallel_degree")}),
    "parallelism": rows.section(_PARALLELISM),
    "experimental": rows.section(_PARALLELISM, ignored="torchtitan.experimental"),
    "activation_checkpoint": rows.section(CHECKPOINTING_ROWS),
    "optimizer": rows.section(_OPTIMIZER),
    "compile": rows.section(
        {
            "enable": rows.turned_on({Setting.COMPILE: True}),
            **rows.part_of(
                "the graph trainer",
                "mode passes enable_passes disable_passes debug_graph_passes memory_policy full_recompute_save_ops"
                " pass_pipeline inductor_compilation numerics_changing_optim cpu_offload_prefetch_n_layers"
                " cpu_offload_defer_n_layers joint_passes precompile_artifact_dir"
                " cpu_offload_budget_gb enable_fsdp_ag_rs_overlap enable_fsdp_dense_region_overlap ep_overlap"
                " enable_autoparallel",
            ),
        },
        ignored="torchtitan.compile",
    ),
    "model": rows.section(
        {
            **rows.part_of("model", "name flavor"),
            "config": rows.text(Setting.MODEL),
            **rows.lacking("low-precision layers (float8, MXFP8, NVFP4)", "converters"),
        },
        ignored="torchtitan.model",
    ),
    **rows.part_of("model", "model_spec hf_model"),
    # the backend that trains transformers' models
    "hf_transformers": rows.section({"model": rows.text(Setting.MODEL)}, ignored="torchtitan.hf_transformers"),
    **rows.part_of("loss", "loss"),
    "validation": rows.section(rows.left_out(shared.EVALUATION, "enable enabled"), ignored="torchtitan.validation"),
    **rows.part_of(shared.EVALUATION, "validator"),
    # used where model.converters names float8
    "float8": rows.section(rows.lacking("float8 layers", "enable_float8_linear"), ignored="torchtitan.float8"),
    **rows.lacking("image generation", "encoder", remedy=OTHER_TRAINING),
}


def _finish(reading: Reading, values: Mapping[str, Any]) -> None:
    """Read what depends on several keys: model, tokens, engine, checkpointing and loss."""
    _set_model(reading, values)
    sections = (rows.object_in(values, name) for name in ("training", "experimental", "parallelism"))
    _set_engine(reading, dict(chain.from_iterable(section.items() for section in sections)))
    _set_tokens(reading, rows.object_in(values, "training"))
    if "model_spec" not in values:
        set_from_file(reading, rows.object_in(values, "activation_checkpoint"))
    _set_classes(reading, values)
    reading.assumed.append("the model code of transformers, not that of torchtitan")


def _set_model(reading: Reading, values: Mapping[str, Any]) -> None:
    key = "model_spec" if "model_spec" in values else "model"
    name, flavor = (rows.object_in(values, key).get(part) for part in ("name", "flavor"))
    if isinstance(name, str) and isinstance(flavor, str) and Setting.MODEL not in reading.settings:
        # the catalog has short names of the same form: NAME-SIZE
        reading.set(key, {Setting.MODEL: _MODELS.get(f"{name}-{flavor}", f"{name}-{flavor}")})


def _number(reading: Reading, values: Mapping[str, Any], key: str, default: int = -1) -> int:
    """A whole number of at least -1; -1 means that it follows from other settings."""
    value = values.get(key)
    return default if value is None else rows.whole_number_at(reading, key, value, -1)


# what their number of sequences sets, and the option that replaces one that is not whole
_TOKENS = (
    ("num_tokens_per_microbatch_per_dp_rank", "a micro-batch", Setting.BATCH, Setting.BATCH),
    ("num_tokens_per_train_step", "a step", Setting.TRAIN_BATCH, Setting.GRAD_ACCUM),
)


def _set_engine(reading: Reading, parallelism: Mapping[str, Any]) -> None:
    replicate = _number(reading, parallelism, "data_parallel_replicate_degree", 1)
    shard = _number(reading, parallelism, "data_parallel_shard_degree")
    # -1 shards over all GPUs that are there
    reading.defaults[Setting.SEVERAL] = "fsdp2" if shard != 1 else "ddp"
    # its groups are those of accelerate: embedding, layers, final norm with head (models/llama3/parallelize.py)
    reading.defaults[Setting.WRAP] = "accelerate"
    reading.defaults[Setting.REDUCE_DTYPE] = "float32"
    if shard > 1:
        several = {
            Setting.ENGINE: "fsdp2",
            Setting.GPUS: shard * max(replicate, 1),
            Setting.REPLICATE: max(replicate, 1),
        }
        reading.set("parallelism.data_parallel_shard_degree", several)
    elif replicate > 1:
        reading.set("parallelism.data_parallel_replicate_degree", {Setting.ENGINE: "ddp", Setting.GPUS: replicate})
    if parallelism.get("fsdp_reshard_after_forward") == "never":
        reading.set("parallelism.fsdp_reshard_after_forward", {Setting.RESHARD: False})


def _set_tokens(reading: Reading, training: Mapping[str, Any]) -> None:
    """Micro-batches and steps by their tokens; a step of -1 is one micro-batch on each GPU."""
    length, total = reading.value(Setting.SEQ), _number(reading, training, "global_batch_size")
    if total > 0:
        reading.set("training.global_batch_size", {Setting.TRAIN_BATCH: total})
    for name, whole, setting, option in _TOKENS:
        tokens = _number(reading, training, name)
        if tokens > 0 and length:
            batch, rest = divmod(tokens, length)
            if rest or not batch:
                what = f"{whole} of {tokens} tokens in sequences of {length}"
                reading.lack(f"training.{name}", what, setting=option)
            else:
                reading.set(f"training.{name}", {setting: batch})


def _set_classes(reading: Reading, values: Mapping[str, Any]) -> None:
    """What the classes of a function's configuration say: checkpointing, loss, attention and converters."""
    if "model_spec" not in values:
        return
    set_from_class(reading, rows.object_in(values, "activation_checkpoint"))
    _set_loss(reading, rows.object_in(values, "loss"))
    _refuse_classes(reading, values)
    if not rows.is_off(rows.object_in(values, "validator").get("enable")):
        reading.left_out["validator"] = shared.EVALUATION


def _set_loss(reading: Reading, values: Mapping[str, Any]) -> None:
    loss, inner = values.get(CLASS), rows.object_in(values, "loss_fn").get(CLASS, _PLAIN_LOSS)
    if loss == _PLAIN_LOSS:
        reading.set("loss", {Setting.LOSS: "hf"})
    elif loss in _CHUNKED_LOSSES and inner == _PLAIN_LOSS:
        chunks = values.get("num_chunks", TITAN_CHUNKS)
        if chunks == TITAN_CHUNKS:
            reading.set("loss", {Setting.LOSS: "titan-chunked"})
        else:
            reading.lack("loss", f"a loss in {chunks} chunks", setting=Setting.LOSS)
    elif loss is not None:
        what = loss if inner == _PLAIN_LOSS else f"{loss} of {inner}"
        reading.lack("loss", f"the loss {what}", setting=Setting.LOSS)


def _refuse_classes(reading: Reading, values: Mapping[str, Any]) -> None:
    """Classes for which recipes have nothing: trainers, layers, attention and optimizers."""
    trainer = values.get(CLASS, "Trainer")
    if trainer != "Trainer":
        reading.lack(CLASS, f"the trainer {trainer}", remedy=OTHER_TRAINING)
    classes = _classes(rows.object_in(values, "model_spec"))
    if any(name.startswith("LoRA") for name in classes):
        reading.lack("model_spec", "torchtitan's LoRA", remedy=OTHER_TRAINING)
    if "FlexAttention" in classes:
        reading.assumed.append("flex attention keeps what sdpa's fused kernels keep: its output and a number per row")
    if low := sorted(name for name in classes if name.startswith(("Float8", "MXFP8", "NVFP4"))):
        reading.lack("model_spec", f"low-precision layers ({', '.join(low)})")
    optimizers = {group.get("optimizer_name") for group in rows.object_in(values, "optimizer").get("param_groups", ())}
    if optimizers - {"AdamW"}:
        names = ", ".join(sorted(map(str, optimizers)))
        reading.lack("optimizer", f"optimizer {names}", setting=Setting.OPTIMIZER)


def _classes(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        own = {value[CLASS]} if isinstance(value.get(CLASS), str) else set()
        return own.union(*map(_classes, value.values()))
    return set().union(*map(_classes, value)) if isinstance(value, list) else set()


def values_of_function(source: str) -> dict[str, Any]:
    """Import `module:function`, which runs code of the module, call it, and convert its configuration.

    Raises MissingDependencyError for an import that fails, RecipeError for any other failure.
    """
    module, _, name = source.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module), name)
        result = function()
    except ImportError as error:
        reason = printable(" ".join(str(error).split()))[:120]
        raise MissingDependencyError(f"--config {source}: {reason}. Run it where torchtitan is installed.") from None
    # anything can go wrong in a user's module
    except Exception as error:
        reason = error_line(error, 160)
        raise RecipeError(f"--config {source}: the function cannot be called ({reason}). Fix the module.") from None
    if not dataclasses.is_dataclass(result) or isinstance(result, type):
        raise RecipeError(f"--config {source}: returns {type(result).__name__}, not a configuration of torchtitan.")
    converted: dict[str, Any] = _Converter(source).convert(result, 0)
    return converted


class _Converter:
    """Turns dataclasses into objects that carry the name of their class, within a limit of size and depth."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._left = _MOST_VALUES

    def convert(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            raise RecipeError(f"--config {self._source}: the configuration is too large to read.")
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            # torchtitan nests each Config in the class that it configures
            kind = type(value).__qualname__.removesuffix(".Config").rpartition(".")[2]
            fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
            return {CLASS: kind, **{name: self.convert(item, depth + 1) for name, item in fields.items()}}
        if isinstance(value, Mapping):
            return {str(key): self.convert(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.convert(item, depth + 1) for item in value]
        if isinstance(value, Enum):
            return self.convert(value.value, depth + 1)
        return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


_WRITES: Mapping[str, rows.Spelling] = {
    "precision": lambda recipe: (
        {"training.mixed_precision_param": "bfloat16"} if recipe.precision in (Precision.AMP, Precision.MIXED) else None
    )
}


def _write_mode(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
    if recipe.selective is not None:
        return None
    if recipe.checkpoint_every > 1:
        every = str(recipe.checkpoint_every)
        return {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": every}
    return {"activation_checkpoint.mode": "full" if recipe.checkpointing else "none"}


def _write_class(recipe: TrainingRecipe) -> Mapping[str, Any] | None:
    plain = recipe.selective is None and recipe.checkpoint_every == 1
    return {SECTION: "FullAC" if recipe.checkpointing else None} if plain else None


def _write_tokens(recipe: TrainingRecipe) -> Mapping[str, Any]:
    return {"training.num_tokens_per_microbatch_per_dp_rank": recipe.batch * recipe.seq}


# how the functions of versions after 0.2 write options
FUNCTION_WRITES: Mapping[str, rows.Spelling] = {
    **_WRITES,
    "batch": _write_tokens,
    "seq": lambda recipe: {"training.max_context_length": recipe.seq, **_write_tokens(recipe)},
    "grad_accum": lambda recipe: {
        "training.num_tokens_per_train_step": recipe.batch * recipe.seq * recipe.grad_accum * recipe.gpus
    },
    **dict.fromkeys(("checkpointing", "selective"), _write_class),
}

TORCHTITAN = rows.Framework(
    name=NAME,
    title="a configuration of torchtitan",
    rows=_ROWS,
    signature=frozenset({"training", "parallelism", "activation_checkpoint", "metrics", "job", "model_spec", "comm"}),
    defaults={
        Setting.BATCH: 8,
        Setting.SEQ: 2048,
        Setting.GRAD_ACCUM: 1,
        Setting.CLIP: 1.0,
        Setting.WEIGHTS: "float32",
        Setting.AUTOCAST: "bf16",
        Setting.OPTIMIZER: "adamw-fused",
        Setting.CHECKPOINTING: True,
        **dict.fromkeys((Setting.REENTRANT, Setting.SAVE_WHOLE), False),
        # no micro-batch leaves its gradients whole (train.py, train_step)
        Setting.GRAD_SYNC: "every",
    },
    finish=_finish,
    writes={
        **_WRITES,
        **rows.as_read(_ROWS, "batch seq optimizer"),
        "grad_accum": lambda recipe: {"training.global_batch_size": recipe.batch * recipe.grad_accum * recipe.gpus},
        **dict.fromkeys(("checkpointing", "checkpoint_every", "selective"), _write_mode),
    },
)
