"""What engines, losses and adapters take: one table for conflicts, configuration files and the ladder of advice.

What an optimizer takes is in its row (`torch_memory/optimizers.py`).
"""

from collections.abc import Mapping

from ligerprof.recipe.categories import Engine, Loss, Precision

_SEVERAL = (Engine.DDP, Engine.FSDP2, Engine.DEEPSPEED)
_OF_TORCH = tuple(precision for precision in Precision if not precision.is_mixed)
# in a mixed one, the engine keeps fp32 weights next to the 16-bit ones that it computes with
PRECISIONS: Mapping[Engine, tuple[Precision, ...]] = {
    **dict.fromkeys((Engine.TORCH, Engine.DDP), _OF_TORCH),
    # does not scale the loss
    Engine.FSDP2: (Precision.MIXED, *(each for each in _OF_TORCH if each.autocast != "float16")),
    Engine.DEEPSPEED: (Precision.MIXED, Precision.MIXED_FP16, Precision.FP32),
}
# the engines that carry out an option; others take its default alone
ENGINES: Mapping[str, tuple[Engine, ...]] = {
    "gpus": _SEVERAL,
    "zero": (Engine.DEEPSPEED,),
    "deepspeed_config": (Engine.DEEPSPEED,),
    "grad_sync": (Engine.DDP, Engine.FSDP2),
    "save_whole": (Engine.FSDP2, Engine.DEEPSPEED),
    "bucket_view": (Engine.DDP,),
    **dict.fromkeys(("reshard", "wrap", "reduce_dtype", "replicate"), (Engine.FSDP2,)),
    **dict.fromkeys(("activation_offload", "compile", "modules_to_save", "dora"), (Engine.TORCH,)),
    "adapter_dtype": (Engine.TORCH, Engine.DDP),
}
# options that all engines carry out but one
EXCEPT: Mapping[str, Engine] = {
    **dict.fromkeys(("qlora", "quantization"), Engine.FSDP2),
    **dict.fromkeys(("checkpoint_every", "selective"), Engine.DEEPSPEED),
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


def takes(engine: Engine, name: str) -> bool:
    """Whether an engine takes other values of an option than its default."""
    return engine in ENGINES.get(name, (engine,)) and EXCEPT.get(name) is not engine
