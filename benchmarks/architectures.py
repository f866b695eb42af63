"""Check small models of every architecture: peaks measured, simulated and estimated, and losses with kernels.

python benchmarks/architectures.py steps cuda FILE.json        # on the GPU, 2 minutes
python benchmarks/architectures.py losses cuda FILE.json       # on the GPU, 5 minutes: adds to it
python benchmarks/architectures.py steps simulated FILE.json   # anywhere: adds to it and prints the errors
python benchmarks/architectures.py table FILE.json             # docs/results/architectures-h200.md
python benchmarks/architectures.py tapes FILE.json             # anywhere: a line per estimate from a tape

`--only mixtral,phi` chooses architectures. `losses cpu` tries the losses without a GPU, by the provider torch.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from accuracy import run_step

from ligerprof import TrainingRecipe, estimate
from ligerprof.errors import LigerprofError
from ligerprof.models import ARCHITECTURES, spec_from_config
from ligerprof.runs.tapes import trace
from ligerprof.runs.tapes.traced import with_tape

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "sliding_window": 512,
}
_FEW_EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
_LATENT = {
    **_FEW_EXPERTS,
    "num_key_value_heads": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "head_dim": 32,
    "v_head_dim": 64,
}
_DELTA = {
    **_FEW_EXPERTS,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
# model_type: values that its config requires in addition to the sizes; some that have no row are there, too
MORE: dict[str, dict[str, Any]] = {
    "falcon": {"new_decoder_architecture": False, "head_dim": None},
    "gpt2": {"n_embd": 512, "n_layer": 6, "n_head": 8, "n_positions": 2048, "intermediate_size": None},
    "opt": {"ffn_dim": 1408, "word_embed_proj_dim": 512},
    # values drawn at random in a dropout would differ between a run with kernels and one without
    "seed_oss": {"residual_dropout": 0.0, "attention_dropout": 0.0},
    **{name: _FEW_EXPERTS for name, row in ARCHITECTURES.items() if row.mlp.experts is not None},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dots1": {**_FEW_EXPERTS, "n_shared_experts": 1},
    "exaone_moe": {**_FEW_EXPERTS, "sliding_window_pattern": 2},
    "glm4_moe_lite": _LATENT,
    "youtu": _LATENT,
    "bamba": {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64, "attn_layer_indices": [2, 5]},
    "granitemoehybrid": {
        **_FEW_EXPERTS,
        "shared_intermediate_size": 512,
        "layer_types": ["mamba", "mamba", "attention"] * 2,
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
    },
    "falcon_h1": {"mamba_d_ssm": 1024, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 64},
    "gemma3n_text": {
        # of the six layers, the first two set gates to zero and the last two reuse keys and values
        "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": 32000,
        "laurel_rank": 16,
    },
    "granitemoeshared": {**_FEW_EXPERTS, "shared_intermediate_size": 512},
    "lfm2_moe": {**_FEW_EXPERTS, "layer_types": ["conv", "full_attention"] * 3, "num_dense_layers": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "llama4_text": {**_FEW_EXPERTS, "intermediate_size_mlp": 1408, "interleave_moe_layer_step": 2},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _DELTA),
}
_DROPOUTS = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
OPTIONS = {"precision": "bf16", "batch": 4, "seq": 1024, "gpu": "h200"}
# the smallest factor that changes fp32 weights
PERTURBATION = 2.0**-23
STEPS, FIRST_STEPS, LOSS_ROWS, LOSS_TOKENS = 20, 8, 2, 256
PROCESSES = 6
HEADING = """# Small models of every architecture

Random models of six layers and hidden size 512 on one {gpu}, measured on {date}
with {versions}; simulated with torch 2.13 and transformers 5.23. Peaks: bf16, checkpointed,
4 x 1024 tokens, no kernels. Last columns: the largest relative difference of the losses with and without
`apply(model, "all")` over the first 8 and over 20 steps. Training amplifies rounding, most of all where tokens change
their experts: `perturbed` is the difference in fp32 over 20 steps between two runs without kernels, one of which
starts from weights that are larger by a factor of 1 + 2^-23. Where kernels change a loss by more than 1e-5, so does
that, except for granitemoehybrid. Its losses with kernels agree to 2e-7 for 13 steps and then diverge, as they do on
a CPU after one token in one layer gets its third expert instead of its second; the factor scales all scores of a
router alike.

`bamba`, `falcon_h1`, `gemma3n_text`, `granitemoehybrid` and `phimoe` were measured with transformers 5.23, which
computes the scan of a state space with `einsum`. transformers 5.17 computes it with a tensor of all pairs of tokens
in a chunk and all states: there the steps of bamba, falcon_h1 and granitemoehybrid take 9,042.9, 9,097.7 and 9,775.3
MiB.

Estimates of mixtures are up to 0.54 % high: moments of 11 MiB keep remainders of 1 MiB where each has a segment of its
own, as the estimate counts them. These steps take them from cached memory. With expandable segments, which leave no
remainders, the estimate of phimoe is within 0.001 % of its simulation.

`transformers` 5.17 lacks internlm3 and iquestcoder. Types without an estimate have no row in ligerprof.
Rows, with all losses: `benchmarks/results/architectures-h200-rows.json`; `python benchmarks/architectures.py table` of
them prints this page.
"""


def config_of(model_type: str) -> dict[str, Any]:
    values = {"model_type": model_type, **SIZES, **_DROPOUTS, **MORE.get(model_type, {})}
    return {key: value for key, value in values.items() if value is not None}


def options_of(model_type: str) -> dict[str, Any]:
    # transformers has no other attention for scores with a cap or with sinks
    row = ARCHITECTURES.get(model_type)
    if row is None:
        return OPTIONS
    capped = row.attention.softcap is not None and row.attention.softcap.default is not None
    return {**OPTIONS, "attention": "eager"} if capped or row.attention.sinks else OPTIONS


def estimated_bytes(model_type: str) -> int | None:
    try:
        spec = spec_from_config(config_of(model_type), name=model_type)
        return estimate(TrainingRecipe(model=spec, **options_of(model_type))).peak_bytes
    except LigerprofError:
        return None


def traced_bytes(model_type: str) -> tuple[int, int]:
    """Peak and reserved bytes of the estimate from a tape, traced at the size of the step alone."""
    spec = replace(spec_from_config(config_of(model_type), name=model_type), no_estimate_reason="its tape is wanted")
    with mock.patch.object(trace, "_grids", return_value=[]):
        recipe = with_tape(TrainingRecipe(model=spec, **options_of(model_type)), lambda _text: None)
    found = estimate(recipe)
    return found.peak_bytes, found.run.reserved_bytes


def tapes(names: list[str], rows: dict[str, dict[str, Any]]) -> None:
    """Print how far both estimates of each measured step are from it, and reserved bytes from a tape."""
    for model_type in (name for name in names if rows.get(name, {}).get("cuda", {}).get("peak_bytes")):
        measured = rows[model_type]["cuda"]
        try:
            peak_bytes, reserved_bytes = traced_bytes(model_type)
        except LigerprofError as error:
            print(f"{model_type:20} {error}", flush=True)
            continue
        formed_bytes = estimated_bytes(model_type)
        cells = [
            f"{100 * (number / truth - 1):+.4f} %" if number else "none"
            for number, truth in (
                (peak_bytes, measured["peak_bytes"]),
                (formed_bytes, measured["peak_bytes"]),
                (reserved_bytes, measured["reserved_bytes"]),
            )
        ]
        print(f"{model_type:20} {measured['peak_bytes']:>14,}  tape {cells[0]}  forms {cells[1]}  reserved {cells[2]}")


def run_steps(device: str, names: list[str], rows: dict[str, dict[str, Any]], save: Callable[[], None]) -> None:
    def run(model_type: str) -> dict[str, Any]:
        options = options_of(model_type)
        if device == "cuda":
            options = {key: value for key, value in options.items() if key != "gpu"}
        return run_step({"model": config_of(model_type), "device": device, **options})

    with ThreadPoolExecutor(PROCESSES if device == "cuda" else 2) as pool:
        for model_type, row in zip(names, pool.map(run, names), strict=True):
            rows.setdefault(model_type, {})[device] = row
            print(model_type, row.get("peak_bytes"), row.get("failed", ""), file=sys.stderr, flush=True)
            save()


def losses_of(model_type: str, device: str, kernels: str | None, dtype: str, *, perturbed: bool = False) -> list[float]:
    """The losses of STEPS steps from the same weights, or from weights that differ by 1e-7, on the same tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ligerprof.kernels import apply

    torch.manual_seed(0)
    config = AutoConfig.for_model(**config_of(model_type))
    config.use_cache = False
    attention = options_of(model_type).get("attention", "sdpa")
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
    model = model.train().to(device)
    if kernels is not None:
        apply(model, kernels, provider="torch" if device == "cpu" else "ligerprof")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if perturbed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + PERTURBATION)
    tokens = torch.randint(1, SIZES["vocab_size"], (LOSS_ROWS, LOSS_TOKENS), device=device)
    found = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def run_losses(device: str, names: list[str], rows: dict[str, dict[str, Any]], save: Callable[[], None]) -> None:
    for model_type in (name for name in names if name in ARCHITECTURES):
        found: dict[str, Any] = {}
        for dtype in ("float32", "bfloat16") if device == "cuda" else ("float32",):
            try:
                plain, patched = (losses_of(model_type, device, kernels, dtype) for kernels in (None, "all"))
                found[dtype] = {"plain": plain, "patched": patched}
                if dtype == "float32":
                    # how far training itself carries the smallest difference
                    found[dtype]["perturbed"] = losses_of(model_type, device, None, dtype, perturbed=True)
                error = largest_difference(found[dtype])
                print(f"{model_type} {dtype}: losses differ by at most {error:.1e}", file=sys.stderr, flush=True)
            except Exception as error:
                found[dtype] = {"failed": f"{type(error).__name__}: {error}"[:500]}
                print(model_type, dtype, found[dtype]["failed"], file=sys.stderr, flush=True)
        rows.setdefault(model_type, {})[f"losses {device}"] = found
        save()


def largest_difference(losses: dict[str, list[float]], steps: int = STEPS, *, of: str = "patched") -> float:
    pairs = zip(losses[of][:steps], losses["plain"][:steps], strict=True)
    return max(abs(ours / theirs - 1) for ours, theirs in pairs)


def table(rows: dict[str, dict[str, Any]]) -> None:
    """docs/results/architectures-h200.md: rows with a measured step."""
    measured = {name: row for name, row in rows.items() if row.get("cuda", {}).get("peak_bytes")}
    if not measured:
        return
    first = next(iter(measured.values()))["cuda"]
    versions = ", ".join(f"{name} {first['versions'][name]}" for name in ("torch", "triton", "transformers"))
    dates = " and ".join(sorted({row["cuda"]["finished"][:10] for row in measured.values()}))
    print(HEADING.format(gpu=first["gpu"], date=dates, versions=versions))
    kinds = " | ".join(f"{dtype}, {steps} steps" for dtype in ("fp32", "bf16") for steps in (FIRST_STEPS, STEPS))
    print(f"| architecture | measured peak, MiB | simulated | estimated | {kinds} | perturbed |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for model_type, row in sorted(measured.items()):
        truth = row["cuda"]["peak_bytes"]
        cells = [f"{truth / 2**20:,.1f}"]
        for number in (row.get("simulated", {}).get("peak_bytes"), estimated_bytes(model_type)):
            cells.append(f"{100 * (number / truth - 1):+.3f} %" if number else "")
        for dtype in ("float32", "bfloat16"):
            losses = row.get("losses cuda", {}).get(dtype, {})
            for steps in (FIRST_STEPS, STEPS):
                cells.append(f"{largest_difference(losses, steps):.1e}" if "patched" in losses else "")
        losses = row.get("losses cuda", {}).get("float32", {})
        cells.append(f"{largest_difference(losses, of='perturbed'):.1e}" if "perturbed" in losses else "")
        print(f"| {model_type} | {' | '.join(cells)} |")


def merge(files: list[Path]) -> dict[str, dict[str, Any]]:
    """The rows of several files, each with the columns that any file has."""
    rows: dict[str, dict[str, Any]] = {}
    for path in files:
        for model_type, row in json.loads(path.read_text()).items() if path.exists() else ():
            rows.setdefault(model_type, {}).update(row)
    return dict(sorted(rows.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "losses", "table", "tapes"))
    parser.add_argument("device", choices=("cuda", "simulated", "cpu"), nargs="?", default="cuda")
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", help="model types, joined by commas")
    parser.add_argument("--merge", type=Path, action="append", default=[], help="a file whose rows are added")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    results = arguments.results
    rows = merge([results, *arguments.merge])
    names = arguments.only.split(",") if arguments.only else sorted({*ARCHITECTURES, *MORE})

    def save() -> None:
        results.write_text(json.dumps(rows, indent=1) + "\n")

    if arguments.what == "tapes":
        tapes(names, rows)
        return
    if arguments.what == "steps":
        run_steps(arguments.device, names, rows, save)
    elif arguments.what == "losses":
        run_losses(arguments.device, names, rows, save)
    save()
    if arguments.what != "losses":
        table(rows)


if __name__ == "__main__":
    main()
