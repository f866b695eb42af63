"""Which options exclude each other, and which combinations this version or this machine cannot run.

What an optimizer takes is in its row (`torch_memory/optimizers.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from importlib.util import find_spec
from itertools import chain
from typing import Any

from ligerprof.errors import MissingDependencyError, RecipeError, UnsupportedError
from ligerprof.files import is_folder
from ligerprof.gpus import Vendor
from ligerprof.models.spec import Task
from ligerprof.recipe.categories import AdapterDtype, Attention, Engine, Loss, Offload, Optimizer, Precision, Wrap
from ligerprof.recipe.options import options_of
from ligerprof.recipe.routing import conflict
from ligerprof.recipe.training_options import ALL_LINEAR, TrainingOptions
from ligerprof.text import short_repr
from ligerprof.torch_memory.chunked_losses import TITAN_CHUNKS
from ligerprof.torch_memory.saved_tensors import MATMULS, layer_runs

_SEVERAL = (Engine.DDP, Engine.FSDP1, Engine.FSDP2, Engine.DEEPSPEED)
_OF_TORCH = tuple(precision for precision in Precision if not precision.is_mixed)
# in a mixed one, the engine keeps fp32 weights next to the 16-bit ones that it computes with
PRECISIONS: Mapping[Engine, tuple[Precision, ...]] = {
    **dict.fromkeys((Engine.TORCH, Engine.DDP), _OF_TORCH),
    Engine.FSDP1: (Precision.MIXED, Precision.BF16, Precision.FP32),
    # does not scale the loss
    Engine.FSDP2: (Precision.MIXED, *(each for each in _OF_TORCH if each.autocast != "float16")),
    Engine.DEEPSPEED: (Precision.MIXED, Precision.MIXED_FP16, Precision.FP32),
}
# the engines that carry out an option; others take its default alone
ENGINES: Mapping[str, tuple[Engine, ...]] = {
    "gpus": _SEVERAL,
    "zero": (Engine.DEEPSPEED,),
    "deepspeed_config": (Engine.DEEPSPEED,),
    "grad_sync": (Engine.DDP, Engine.FSDP1, Engine.FSDP2),
    "save_whole": (Engine.FSDP1, Engine.FSDP2, Engine.DEEPSPEED),
    "bucket_view": (Engine.DDP,),
    **dict.fromkeys(("reshard", "reduce_dtype"), (Engine.FSDP1, Engine.FSDP2)),
    **dict.fromkeys(("wrap", "replicate"), (Engine.FSDP2,)),
    "backward_prefetch": (Engine.FSDP1,),
    **dict.fromkeys(("activation_offload", "compile", "modules_to_save", "dora"), (Engine.TORCH,)),
    "adapter_dtype": (Engine.TORCH, Engine.DDP),
}
# options that all engines carry out but these
EXCEPT: Mapping[str, tuple[Engine, ...]] = {
    **dict.fromkeys(("qlora", "quantization"), (Engine.FSDP1, Engine.FSDP2)),
    **dict.fromkeys(("checkpoint_every", "selective"), (Engine.DEEPSPEED,)),
    "lora": (Engine.FSDP1,),
}
# losses that are covered with one engine alone
LOSSES: Mapping[Loss, Engine] = {Loss.TITAN_CHUNKED: Engine.TORCH}
# options that mean nothing without one of others
NEEDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("lora_targets", "modules_to_save", "lora_dropout", "adapter_dtype"), ("lora", "qlora")),
    "dora": ("lora",),
    "nested_quant": ("qlora",),
    "fp32_saved_modules": ("modules_to_save",),
}
# pairs of options that exclude each other, and why
APART: Mapping[tuple[str, str], str] = {
    ("lora", "qlora"): "",
    ("padding", "lengths"): ", from which it follows",
    ("padding", "packing"): ", which leaves none",
    ("selective", "reentrant"): ", which has no cache of outputs",
    **dict.fromkeys((("compile", "activation_offload"), ("adapter_dtype", "dora")), " yet"),
    **dict.fromkeys((("dora", "quantization"), ("compile", "quantization")), " yet"),
}
# options that mean nothing without checkpointing
_OF_CHECKPOINTING = ("reentrant", "checkpoint_every", "selective")


def takes(engine: Engine, name: str) -> bool:
    """Whether an engine takes other values of an option than its default."""
    return engine in ENGINES.get(name, (engine,)) and engine not in EXCEPT.get(name, ())


def typed(name: str, value: Any) -> str:
    """An option with its value as typed, such as `--zero 3`, for messages."""
    return " ".join(options_of(TrainingOptions)[name].typed(value))


_CHECKPOINTING = options_of(TrainingOptions)["checkpointing"]
_FLAGS = {name: declared.flag for name, declared in options_of(TrainingOptions).items()}
_DEFAULTS = {name: declared.default for name, declared in options_of(TrainingOptions).items()}
_DEEPSPEED, _FSDP2 = typed("engine", Engine.DEEPSPEED), typed("engine", Engine.FSDP2)


def require_compatible(options: TrainingOptions) -> None:
    """Raise RecipeError for the first conflict between options."""
    changed = {name for name, default in _DEFAULTS.items() if getattr(options, name) != default}
    for message in chain(
        _engine_table_conflicts(options, changed),
        _pair_conflicts(options, changed),
        *(rule(options) for rule in _RULES),
    ):
        raise RecipeError(message)


def _engine_table_conflicts(options: TrainingOptions, changed: Set[str]) -> Iterator[str]:
    """What the tables of engines and losses say, as messages; `changed` are the options not at their defaults."""
    engine, precision, loss, trains_in = options.engine, options.precision, options.loss, PRECISIONS[options.engine]
    if precision not in trains_in:
        if precision.is_mixed and not any(each.is_mixed for each in trains_in):
            yield f"precision {precision} needs {_DEEPSPEED} or {_FSDP2}. Add one, or choose amp."
        scales = ", and does not scale the loss" if engine is Engine.FSDP2 else ""
        yield f"engine {engine} trains in {_listed(trains_in)}, not {precision}{scales}."
    for name, engines in ENGINES.items():
        if name in changed and engine not in engines:
            yield f"{_shown(options, name)} needs {_listed([typed('engine', each) for each in engines])}."
    for name, others in EXCEPT.items():
        if name in changed and engine in others:
            yield f"{_FLAGS[name]} is not supported with {typed('engine', engine)} yet. Leave one of them out."
    if LOSSES.get(loss, engine) is not engine:
        needed = typed("engine", LOSSES[loss])
        yield f"{typed('loss', loss)} is covered with {needed} only. Choose another {_FLAGS['loss']}."


def _pair_conflicts(options: TrainingOptions, changed: Set[str]) -> Iterator[str]:
    for name, others in NEEDS.items():
        if name in changed and changed.isdisjoint(others):
            yield f"{_shown(options, name)} needs {_listed([_FLAGS[other] for other in others])}."
    for (name, other), why in APART.items():
        if {name, other} <= changed:
            yield f"{_shown(options, name)} does not go with {_shown(options, other)}{why}. Leave one of them out."
    for name in _OF_CHECKPOINTING:
        if name in changed and not options.checkpointing:
            yield f"{_FLAGS[name]} does not go with {_CHECKPOINTING.off_flag}."


def _shown(options: TrainingOptions, name: str) -> str:
    """An option as typed; free text and objects without their value."""
    value = getattr(options, name)
    return _FLAGS[name] if type(value) is str or isinstance(value, Mapping) else typed(name, value)


def _listed(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _engine_conflicts(options: TrainingOptions) -> Iterator[str]:
    deepspeed, offload, optimizer = options.engine is Engine.DEEPSPEED, options.offload, options.optimizer
    if offload is not Offload.NONE and options.engine not in (Engine.DEEPSPEED, Engine.FSDP2):
        yield f"{typed('offload', offload)} needs {_DEEPSPEED}, or {_FSDP2} for {typed('offload', Offload.ALL)}."
    if optimizer is Optimizer.DEEPSPEED_CPU_ADAM and (offload is Offload.NONE or not deepspeed):
        offloaded = typed("offload", Offload.OPTIMIZER)
        yield f"{optimizer} needs {_DEEPSPEED} and an offloaded optimizer. Add {offloaded} or all."
    if deepspeed and offload.moves_parameters and options.zero != 3:
        yield f"{typed('offload', offload)} moves parameters: it needs {typed('zero', 3)}."
    if deepspeed and offload is Offload.OPTIMIZER and options.zero == 0:
        yield f"{typed('offload', offload)} needs {typed('zero', '1, 2 or 3')}."
    if (offload is Offload.NVME) != (options.nvme_path is not None):
        yield f"{typed('offload', Offload.NVME)} and {_FLAGS['nvme_path']} go together."
    if options.nvme_path is not None and not is_folder(options.nvme_path):
        yield f"{options.nvme_path}: no such folder. {_FLAGS['nvme_path']} names one."
    if deepspeed and optimizer is Optimizer.NONE:
        yield f"engine deepspeed needs an optimizer. Choose another {_FLAGS['optimizer']}."


def _fsdp2_conflicts(options: TrainingOptions) -> Iterator[str]:
    fsdp2, gpus, replicate = options.engine is Engine.FSDP2, options.gpus, options.replicate
    if fsdp2 and options.offload not in (Offload.NONE, Offload.ALL):
        yield f"engine fsdp2 offloads everything or nothing. Choose {typed('offload', Offload.ALL)}."
    if gpus % replicate != 0:
        yield f"{typed('gpus', gpus)} is not a multiple of {typed('replicate', replicate)}. Change one."
    if options.engine.is_fsdp and not options.optimizer.row.on_shards:
        yield f"{options.optimizer} is not supported on {options.engine.upper()}'s shards yet. Choose an AdamW or sgd."
    if options.engine is Engine.FSDP1 and gpus == 1:
        fsdp1, flag = typed("engine", Engine.FSDP1), _FLAGS["gpus"]
        yield f"{fsdp1} shards nothing on one GPU (torch turns to NO_SHARD). Add {flag} 2."
    if fsdp2 and options.lora is not None and options.weight_dtype != "float32":
        yield f"{_FLAGS['lora']} adds fp32 adapters, and FSDP2 shards weights of one dtype. Choose mixed, amp or fp32."


def _model_conflicts(options: TrainingOptions) -> Iterator[str]:
    spec = options.spec
    if options.experts is not None and not spec.experts:
        yield f"{_FLAGS['experts']}: {spec.name} has no experts. Leave it out."
    mixture = spec.architecture.mlp.experts
    if options.experts is not None and mixture is not None and mixture.multiplies_all:
        yield f"{_FLAGS['experts']}: the experts of {spec.name} multiply all tokens in any case. Leave it out."
    layers = sum(spec.layer_kinds.sparse) if spec.experts else 0
    wrong = conflict(options.routing, experts=spec.experts, chosen=spec.chosen_experts, layers=layers)
    if wrong is not None:
        yield f"{_FLAGS['routing']}: {wrong}."
    if spec.task is not Task.CAUSAL and (bool(options.kernels) or options.loss is not Loss.HF or options.packing):
        yield f"{spec.name}, whose class ends in For{spec.task}, takes no kernels, losses and packing. Leave them out."
    if not spec.rotary and options.seq > spec.max_positions:
        yield f"{spec.name} has {spec.max_positions} learned positions, seq is {options.seq}. Choose fewer tokens."


def _selective_conflicts(options: TrainingOptions) -> Iterator[str]:
    flag, layers = _FLAGS["selective"], options.spec.layers
    runs = () if options.selective is None else layer_runs(options.selective)
    listed = sum(run.layers for run in runs)
    if listed > 0 and options.checkpoint_every > 1:
        yield f"{flag} names each layer, and does not go with {_FLAGS['checkpoint_every']}. Leave one out."
    if "rope" in options.kernels and any(run.policy and run.policy.every.keys() & set(MATMULS) for run in runs):
        yield f"{flag} does not go with the kernel rope, which writes over kept outputs. Leave it out."
    if listed not in (0, layers):
        yield f"{flag} names {listed} of the {layers} layers of {options.spec.name}. Name each layer once."


def _loss_conflicts(options: TrainingOptions) -> Iterator[str]:
    spec, chosen, titan = options.spec, typed("loss", options.loss), options.loss is Loss.TITAN_CHUNKED
    if options.loss is not Loss.HF and {"ce", "flce"} & set(options.kernels):
        yield f"{chosen} and the kernel ce or flce replace the same loss. Choose one."
    if (titan or options.loss is Loss.TORCH_LINEAR) and spec.final_softcap is not None:
        yield f"{chosen}: {spec.name} caps its logits, which this loss cannot do. Choose another {_FLAGS['loss']}."
    if options.loss is not Loss.HF and (spec.scales_logits or spec.has_head_bias):
        yield f"{chosen} does not support scaled logits or a bias of the head, and {spec.name} has one. Choose hf."
    if titan and options.tokens % TITAN_CHUNKS != 0:
        yield f"{chosen} splits {options.tokens} tokens into {TITAN_CHUNKS} equal chunks. Choose another batch or seq."
    if titan and options.precision.autocast == "float16":
        yield f"{chosen} computes gradients before the loss is scaled, which {options.precision} needs. Choose amp."


def _adapter_conflicts(options: TrainingOptions) -> Iterator[str]:
    spec, dtype = options.spec, options.adapter_dtype
    layers = spec.architecture.adaptable
    unknown = [name for name in options.adapted_layers if name not in layers]
    if options.lora_targets != ALL_LINEAR and unknown:
        yield f"{spec.name} has no linear layer {short_repr(unknown[0])}. It has: {', '.join(layers)}."
    if options.quantization is not None and options.lora is None:
        # `--lora R --quantization 4bit` has become `--qlora R`
        over, lora = typed("quantization", options.quantization), _FLAGS["lora"]
        if options.qlora is None:
            yield f"{over} needs {lora}."
        yield f"{_FLAGS['qlora']} trains over 4-bit weights. Use {lora} {options.qlora} with {over}."
    saved_in_fp16 = bool(options.saved_modules) and not options.fp32_saved_modules
    in_full = (options.lora is None and options.qlora is None) or saved_in_fp16
    if in_full and options.precision is Precision.FP16_AMP:
        yield f"precision {options.precision} trains adapters only: GradScaler refuses gradients in fp16. Choose amp."
    if dtype is not AdapterDtype.FLOAT32 and options.precision.uses_float16:
        yield f"{typed('adapter_dtype', dtype)} does not go with {options.precision}, whose loss is scaled."


def _outer_adapter_conflicts(options: TrainingOptions) -> Iterator[str]:
    """What adapters on the head and on the embedding do not go together with."""
    spec, reader = options.spec, options.providers.get("flce", "ligerprof")
    if outer := [name for name in options.adapted_layers if name not in spec.architecture.lora_targets]:
        adapted = f"{_FLAGS['lora_targets']} {'+'.join(outer)}"
        if options.dora:
            yield f"{_FLAGS['dora']} adapts linear layers of decoder layers. Leave {adapted} out."
        if options.engine is not Engine.TORCH:
            yield f"{adapted} is not supported with {typed('engine', options.engine)} yet. Leave it out."
        if set(outer) & set(options.saved_modules) or (spec.tied_embeddings and options.saved_modules):
            yield f"{adapted} and {_FLAGS['modules_to_save']} {options.modules_to_save} train one weight. Give one."
    if options.adapts_head and options.loss not in (Loss.HF, Loss.HF_4_45):
        yield f"{_FLAGS['loss']} {options.loss} reads the head's weight, and would ignore its adapters. Choose hf."
    if options.adapts_head and reader not in ("ligerprof", "torch"):
        yield f"flce of {reader} reads the head's weight and would ignore its adapters. Leave it out."


def _saved_module_conflicts(options: TrainingOptions) -> Iterator[str]:
    known = [name for name in options.spec.module_names if name not in options.spec.architecture.lora_targets]
    for name in options.saved_modules:
        if name not in known:
            yield f"{_FLAGS['modules_to_save']} cannot take {short_repr(name)}. Choose from: {', '.join(known)}."


# the first conflict is the one that a user reads
_RULES: Sequence[Callable[[TrainingOptions], Iterator[str]]] = (
    *(_engine_conflicts, _fsdp2_conflicts, _model_conflicts, _adapter_conflicts, _outer_adapter_conflicts),
    *(_saved_module_conflicts, _selective_conflicts, _loss_conflicts),
)


def require_positions(options: TrainingOptions) -> None:
    """Raise RecipeError if a sequence is longer than the model's config allows.

    A recipe may have one: rotary positions go on without end, and a training can scale them.
    """
    spec = options.spec
    if options.seq > spec.max_positions:
        raise RecipeError(
            f"{typed('seq', options.seq)}: {spec.name} has {spec.max_positions} positions. Choose fewer tokens, or give"
            " a config.json with a larger max_position_embeddings."
        )


def require_supported(options: TrainingOptions, *, command: str, simulated: bool = False) -> None:
    """Raise UnsupportedError for the first option that this version cannot run, on a GPU or simulated."""
    require_gathered_head(options, command=command)
    if simulated and options.engine is Engine.DEEPSPEED and options.offload is Offload.NVME:
        what = f"{typed('offload', options.offload)} with {_DEEPSPEED}"
        raise UnsupportedError(f"{command}: the simulator does not cover {what}. Use `ligerprof estimate`, or a GPU.")
    if simulated and options.gpu_spec.vendor is not Vendor.NVIDIA:
        raise UnsupportedError(
            f"{command}: {typed('gpu', options.gpu)} cannot be simulated yet; ROCm selects other kernels. Use"
            f" {typed('gpu', 'h200')}."
        )
    if options.attention is Attention.FLASH:
        flash = typed("attention", Attention.FLASH)
        raise UnsupportedError(f"{command}: {flash} is not supported yet; use {Attention.SDPA}.")


def require_gathered_head(options: TrainingOptions, *, command: str) -> None:
    """Raise UnsupportedError if a loss reads the head's weight where accelerate leaves it sharded.

    With adapters, fsdp2_prepare_model finds no final norm, and the head becomes a group that nothing gathers.
    """
    liger = options.providers.get("flce") == "liger"
    alone = options.lora is not None and options.wrap is Wrap.ACCELERATE and not options.spec.tied_embeddings
    if alone and (liger or options.loss.is_chunked):
        loss = "flce of liger" if liger else typed("loss", options.loss)
        raise UnsupportedError(
            f"{command}: {loss} reads the head's weight, which {typed('wrap', options.wrap)} leaves sharded beside"
            f" adapters. Use {typed('wrap', Wrap.LAYERS)}, or ligerprof's flce."
        )


def require_packages(options: TrainingOptions, *, command: str, simulated: bool = False) -> None:
    """Raise MissingDependencyError if a package that the options need is not installed."""
    for flag, package, requirement in _packages(options, simulated):
        if find_spec(package) is None:
            raise MissingDependencyError(
                f"{command}: {flag} needs {package}. Install it with: pip install {requirement}."
            )


def _packages(options: TrainingOptions, simulated: bool) -> Iterator[tuple[str, str, str]]:
    """What pip installs per option: the option as typed, the module, the requirement."""
    for name in ("lora", "qlora"):
        if getattr(options, name) is not None:
            yield _FLAGS[name], "peft", "peft"
    if options.engine is Engine.DEEPSPEED:
        yield _DEEPSPEED, "deepspeed", "deepspeed"
    if simulated:
        return
    if options.packed_bits is not None:
        flag = _FLAGS["qlora"] if options.quantization is None else typed("quantization", options.quantization)
        yield flag, "bitsandbytes", "bitsandbytes"
    if (package := options.optimizer.row.package) is not None:
        yield typed("optimizer", options.optimizer), package, package.replace("_", "-")
