"""The optimizers that configuration files name, by the word of `--optimizer` that each means."""

from collections.abc import Mapping
from typing import Any

from ligerprof.recipe.configs.settings import Sets, Setting
from ligerprof.torch_memory.optimizers import OPTIMIZERS as ROWS

# those that this version does not have are refused by name
_LACKING = ("lion_8bit", "paged_lion_32bit", "paged_lion_8bit", "galore_adamw_8bit", "rmsprop", "adagrad")
OPTIMIZERS: Mapping[str, str] = {
    **{name: word for word, row in ROWS.items() for name in row.names},
    **{name: name.replace("_", "-").removesuffix("-32bit") for name in _LACKING},
}

# transformers' Trainer keeps the moments of embeddings in fp32 (Trainer.create_optimizer)
_EIGHT_BIT = {
    name: Sets(values={Setting.OPTIMIZER: word, Setting.FP32_EMBEDDING_STATES: True})
    for word, row in ROWS.items()
    for name in row.names
    if row.is_eight_bit
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
