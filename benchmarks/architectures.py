"""Measure or simulate small models of transformers architectures for which ligerprof has no specific code.

python benchmarks/architectures.py cuda benchmarks/results/architectures-h200.json        # on the GPU
python benchmarks/architectures.py simulated benchmarks/results/architectures-h200.json   # adds to it, prints errors
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accuracy import run_step

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
# model_type: values that its config requires in addition to the sizes
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "cohere2": {},
    "falcon": {"new_decoder_architecture": False},
    "gemma3_text": {"head_dim": 64},
    "glm4": {"head_dim": 64, "pad_token_id": 0},
    "gpt_neox": {},
    "granite": {},
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "opt": {"ffn_dim": 1408, "word_embed_proj_dim": 512},
    "phi3": {"pad_token_id": 0},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
    "smollm3": {"pad_token_id": 0},
    "stablelm": {},
    "starcoder2": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cuda", "simulated"))
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    device, results = arguments.device, arguments.results
    rows: dict[str, dict[str, Any]] = json.loads(results.read_text()) if results.exists() else {}

    def run(model_type: str) -> dict[str, Any]:
        config = {"model_type": model_type, **SIZES, **ARCHITECTURES[model_type]}
        return run_step({"model": config, "precision": "bf16", "device": device})

    with ThreadPoolExecutor(2) as pool:
        for model_type, row in zip(ARCHITECTURES, pool.map(run, ARCHITECTURES), strict=True):
            rows.setdefault(model_type, {})[device] = row
    results.write_text(json.dumps(rows, indent=1) + "\n")
    print("| architecture | measured peak, MiB | simulated | error |\n|---|---:|---:|---:|")
    for model_type, row in rows.items():
        measured, simulated = (row.get(kind, {}).get("peak_bytes") for kind in ("cuda", "simulated"))
        if measured and simulated:
            error = f"{100 * (simulated / measured - 1):+.3f} %"
            print(f"| {model_type} | {measured / 2**20:,.1f} | {simulated / 2**20:,.1f} | {error} |")


if __name__ == "__main__":
    main()
