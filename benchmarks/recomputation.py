"""Measure steps that recompute, keep or offload activations in other ways, and optimizers; score as accuracy.py does.

python benchmarks/recomputation.py measure RESULTS.jsonl   # on a GPU
python benchmarks/recomputation.py score RESULTS.jsonl     # anywhere
"""

from typing import Any

from accuracy import measure_or_score

AT_ONCE = 3
_LARGE: dict[str, Any] = {"model": "llama3.2-1b", "batch": 4, "seq": 1024}
_SMALL: dict[str, Any] = {"model": "tiny", "batch": 4, "seq": 512}
_ACTIVATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"checkpoint_every": 2},
    {"selective": "matmuls"},
    {"selective": "attention", "checkpoint_every": 4},
    {"selective": "torchtitan", "precision": "bf16-amp"},
    {"selective": "matmuls", "liger": "rms+swiglu+flce"},
    {"activation_offload": True},
    {"activation_offload": True, "lora": 16, "precision": "bf16-amp"},
    {"activation_offload": True, "liger": "all", "precision": "bf16"},
    {"lora": 16, "dora": True, "liger": "all", "precision": "bf16-amp"},
    {"lora": 16, "modules_to_save": "embed_tokens+lm_head", "liger": "all", "precision": "bf16-amp"},
)
_FEW_TOKENS: dict[str, Any] = {"model": "llama3.2-1b", "batch": 1, "seq": 128}
RECIPES: tuple[dict[str, Any], ...] = (
    *({**_LARGE, **options} for options in _ACTIVATIONS),
    *({**_SMALL, **options} for options in _ACTIVATIONS[1::2]),
    *(
        {**_FEW_TOKENS, "optimizer": name, "precision": precision}
        for name in ("sgd-momentum", "adafactor-hf")
        for precision in ("amp", "bf16-amp")
    ),
)


if __name__ == "__main__":
    measure_or_score(RECIPES, at_once=AT_ONCE, description=__doc__)
