"""The optimizers that configuration files name, by the word of `--optimizer` that each means."""

from collections.abc import Mapping
from typing import Any

from ligerprof.recipe.categories import EIGHT_BIT
from ligerprof.recipe.configs.settings import Sets, Setting

# words of --optimizer; those that this version does not have are refused by name
_WORDS = {
    "adamw": "adamw",
    "adamw-fused": "adamw_torch_fused adamw_fused",
    "adamw-foreach": "adamw_torch adamw_hf",
    "adamw-8bit": "adamw_bnb_8bit adamw_8bit",
    "paged-adamw": "paged_adamw_32bit paged_adamw",
    "paged-adamw-8bit": "paged_adamw_8bit",
    "adafactor-hf": "adafactor",
    "lion": "lion_32bit lion lion_pytorch",
    "lion-8bit": "lion_8bit",
    "paged-lion": "paged_lion_32bit",
    "paged-lion-8bit": "paged_lion_8bit",
    "muon": "muon",
    "galore": "galore_adamw galore",
    "galore-8bit": "galore_adamw_8bit",
    "sgd": "sgd",
    "rmsprop": "rmsprop",
    "adagrad": "adagrad",
}
OPTIMIZERS: Mapping[str, str] = {
    name: word for word, names in _WORDS.items() for name in names.split() if word != "adamw"
}

# transformers' Trainer keeps the moments of embeddings in fp32 (Trainer.create_optimizer)
_EIGHT_BIT = {
    name: Sets(values={Setting.OPTIMIZER: word, Setting.FP32_EMBEDDING_STATES: True})
    for name, word in OPTIMIZERS.items()
    if word in EIGHT_BIT
}
TRAINER_OPTIMIZERS: Mapping[str, Any] = {**OPTIMIZERS, **_EIGHT_BIT}

# DeepSpeed builds its own Adam, in one kernel on the GPU or on the CPU where the optimizer is offloaded
DEEPSPEED_OPTIMIZERS: Mapping[str, Any] = {
    "adam": Sets(values={Setting.OPTIMIZER: "default"}),
    "adamw": Sets(values={Setting.OPTIMIZER: "default"}),
    "sgd": "sgd",
    "lion": "lion",
    "muon": "muon",
}
