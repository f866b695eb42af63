"""Read every example configuration of frameworks' repositories and write down what became of it.

    python benchmarks/read_configs.py CHECKOUTS [-o index.json] [--report docs/results/configurations.md]

CHECKOUTS is a folder with one checkout per repository, named OWNER+NAME. The table says of each file whose it is,
how many of its keys are unknown, and what becomes of it:

- `recipe`;
- `lacks`: refused by the name of an architecture, engine or method that ligerprof does not have;
- `refused`: ligerprof has each of them, and still makes no recipe;
- `not read`: no configuration of a training run, or it needs a package or a GPU to be read.

The share of recipes is that of `recipe` among `recipe` and `refused`. A file without a model is read with a small one;
one whose model is not in the catalog with a model of the same architecture: one of the catalog, or a small one, if
ligerprof has a row for the architecture. torchtitan's configurations are functions of its modules: they are read where
torchtitan can be imported.
"""

import argparse
import ast
import collections
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from ligerprof.errors import LigerprofError, UnknownModelError
from ligerprof.models import CONFIGS
from ligerprof.models.architectures import has_row
from ligerprof.recipe.configs.resolve import load_recipe
from ligerprof.recipe.configs.sources import read_sources

# what each repository ships as examples of training
PLACES = {
    "huggingface+trl": ("examples/**/*.yaml", "trl/accelerate_configs/*.yaml", "tests/distributed/data/**/*.yaml"),
    "huggingface+accelerate": ("examples/**/*.yaml", "examples/**/*.yml", "examples/**/*.json"),
    "axolotl-ai-cloud+axolotl": ("examples/**/*.y*ml", "deepspeed_configs/*.json"),
    "hiyouga+LLaMA-Factory": ("examples/**/*.yaml", "examples/**/*.json"),
    "deepspeedai+DeepSpeedExamples": ("training/**/*.json", "compression/**/*.json", "applications/**/*.json"),
    "pytorch+torchtitan": ("torchtitan/**/*.toml",),
}
SUBSTITUTE = "llama3.2-1b"
# a model of an architecture that has no model in the catalog; other sizes are the architecture's defaults
SMALL = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
# the `model_type` of models that files name and the catalog lacks, by the start of their names
MODEL_TYPES = {
    "01-ai/Yi-34B": "llama",
    "canopylabs/orpheus": "llama",
    "casperhansen/llama": "llama",
    "deepcogito/cogito-v1-preview-llama": "llama",
    "hugging-quants/Meta-Llama": "llama",
    "ISTA-DASLab/Meta-Llama": "llama",
    "llama3-debugmodel": "llama",
    "qwen3-debugmodel_moe": "qwen3_moe",
    "qwen3-debugmodel": "qwen3",
    "deepseek_v3-": "deepseek_v3",
    "TechxGenus/Meta-Llama": "llama",
    "agentica-org/DeepCoder": "qwen2",
    "deepcogito/cogito-v1-preview-qwen": "qwen2",
    "katanemo/Plano": "qwen3",
    "mhenrichsen/gemma": "gemma",
    "mistral-community/Mixtral": "mixtral",
    "mistralai/Devstral-Small-2507": "mistral",
    "mistralai/Magistral": "mistral",
    "mistralai/Ministral-8B": "mistral",
    "togethercomputer/RedPajama": "gpt_neox",
    "CohereForAI/c4ai-command-r7b": "cohere2",
    "THUDM/GLM-4-32B-0414": "glm4",
    "allenai/Olmo-3": "olmo3",
    "arcee-ai/AFM": "arcee",
    "nvidia/Nemotron-Mini": "nemotron",
    "swiss-ai/Apertus": "apertus",
    "tencent/Hunyuan-0.5B": "hunyuan_v1_dense",
    "LiquidAI/LFM2-350M": "lfm2",
    "LiquidAI/LFM2-8B-A1B": "lfm2_moe",
    "LnL-AI/dbrx": "dbrx",
    "OpenMOSS-Team/MOSS-VL": "moss_vl",
    "Qwen/Qwen-7B": "qwen",
    "Qwen/Qwen3.5": "qwen3_5",
    "XiaomiMiMo/MiMo": "mimo",
    "ai21labs/AI21-Jamba": "jamba",
    "arcee-ai/Trinity": "afmoe",
    "axolotl-ai-co/gpt-oss": "gpt_oss",
    "gpt_oss": "gpt_oss",
    "axolotl-quants/DeepSeek-V2": "deepseek_v2",
    "cerebras/btlm": "btlm",
    "google/gemma-3n": "gemma3n",
    "ibm-granite/granite-4.0": "granitemoehybrid",
    "mistralai/Ministral-3": "mistral3",
    "mistralai/Voxtral": "voxtral",
    "moonshotai/Kimi-Linear": "kimi_linear",
    "replit/replit-code": "mpt",
    "state-spaces/mamba": "mamba",
    "tiiuae/Falcon-H1": "falcon_h1",
}
# refusals of combinations whose parts ligerprof has; every other one names a part that it lacks
COMBINATIONS = (
    "8-bit weights without LoRA",
    "--",
    "DeepSpeed in fp32",
    "DoRA over",
    "LoRA on ",
    "LoRA over",
    "QLoRA under",
    "a changed configuration of bitsandbytes",
    "a sequence length of null",
    "an offload of the optimizer",
    "communication in another dtype",
    "fp16 under",
    "full training of",
    "gradients accumulated in another dtype",
    "offloading of activations under ",
    "torchtitan's chunked loss under ",
    "packing without",
    "weights in ",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--report", type=Path, help="Markdown table of the verdicts.")
    arguments = parser.parse_args()
    output, report = (path and path.resolve() for path in (arguments.output, arguments.report))
    rows = [row for repository in PLACES for row in read_repository(arguments.checkouts.resolve() / repository)]
    if output is not None:
        write_index(rows, output)
    if report is not None:
        report.write_text(report_of(rows), encoding="utf-8")
    print_summary(rows)


def write_index(rows: list[dict[str, Any]], output: Path) -> None:
    """One line per file, and the commit of each repository."""
    commits = {row["repository"]: row["commit"] for row in rows}
    lines = ",\n".join(
        "  " + json.dumps({key: value for key, value in row.items() if key != "commit" and value not in ([], None)})
        for row in rows
    )
    repositories = json.dumps(commits, indent=1).replace("\n", "\n ")
    output.write_text(f'{{\n "repositories": {repositories},\n "files": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def read_repository(checkout: Path) -> list[dict[str, Any]]:
    commit = commit_of(checkout)
    os.chdir(checkout)
    paths = sorted({path for pattern in PLACES[checkout.name] for path in Path().glob(pattern)})
    sources = [*map(str, paths), *functions_of(checkout)]
    return [
        {"repository": checkout.name.replace("+", "/"), "commit": commit, **read_file(source)} for source in sources
    ]


def functions_of(checkout: Path) -> list[str]:
    """Torchtitan's configurations: the functions without arguments of each config_registry.py, as module:function."""
    sys.path.insert(0, str(checkout))
    found = []
    for path in sorted(Path().glob("**/config_registry.py")):
        module = ".".join(path.with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            plain = isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.args.args
            if plain and not node.args.kwonlyargs:
                found.append(f"{module}:{node.name}")
    return found


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, or the content of a file COMMIT in it."""
    if (checkout / "COMMIT").is_file():
        return (checkout / "COMMIT").read_text(encoding="utf-8").strip()
    git = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def read_file(path: str) -> dict[str, Any]:
    row: dict[str, Any] = {"path": path}
    try:
        readings = read_sources([path])
    except LigerprofError as error:
        return {**row, "framework": None, "unknown": [], "verdict": "not read", "reason": str(error)}
    row["framework"] = readings[0].framework
    row["unknown"] = [key for reading in readings for key in reading.unknown]
    return {**row, **verdict(path)}


def verdict(path: str) -> dict[str, Any]:
    given, note = dict[str, Any](), dict[str, Any]()
    while True:
        try:
            recipe, _ = load_recipe([path], given)
        except UnknownModelError as error:
            named = str(error).partition("unknown model ")[2].partition(":")[0]
            if "has quantized weights" in str(error):
                return {"verdict": "lacks", "reason": "quantized checkpoints (GPTQ, AWQ, MXFP4, …)"}
            if not named:
                # a model of the catalog whose architecture is known by name alone
                model_type = str(error).partition("model_type '")[2].partition("'")[0]
                return {"verdict": "lacks", "reason": f"the architecture {model_type}"}
            note = {"unknown_model": named}
            model_type = model_type_of(named.strip("'"))
            model = model_of(model_type)
            if model is None or given:
                return {"verdict": "lacks", "reason": f"the architecture {model_type}", **note}
            given = {"model": model}
        except LigerprofError as error:
            reason = str(error)
            return {"verdict": "refused" if is_combination(reason) else "lacks", "reason": reason, **note}
        else:
            return {"verdict": "recipe", "summary": recipe.summary, **note}


def model_type_of(name: str) -> str:
    """The `model_type` of a model that the catalog lacks; `unlisted` if `MODEL_TYPES` lacks it, too."""
    return next((kind for start, kind in MODEL_TYPES.items() if name.startswith(start)), "unlisted")


def model_of(model_type: str) -> str | None:
    """A model of that architecture, the usual one for Llamas; None if ligerprof lacks the architecture."""
    if model_type == CONFIGS[SUBSTITUTE]["model_type"]:
        return SUBSTITUTE
    named = next((name for name, config in CONFIGS.items() if config["model_type"] == model_type), None)
    return small_model(model_type) if named is None and has_row(model_type) else named


@cache
def small_model(model_type: str) -> str:
    """A folder with the config of a small model."""
    folder = Path(tempfile.mkdtemp()) / f"small-{model_type}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **SMALL}), encoding="utf-8")
    return str(folder)


def is_combination(reason: str) -> bool:
    """Whether ligerprof has all parts of what a file is refused for."""
    lacking = feature_of(reason)
    needs_engine = " under FSDP version 2" in lacking and not lacking.startswith("FSDP")
    return lacking.startswith(COMBINATIONS) or needs_engine or " is not supported yet" not in reason


def feature_of(reason: str) -> str:
    """What a refusal names, without file and key."""
    return reason.rpartition(" is not supported yet")[0].rpartition(": ")[2] or reason


def report_of(rows: list[dict[str, Any]]) -> str:
    """The verdicts as a page of the documentation."""
    lines = [
        "# Example configurations of other frameworks",
        "",
        "What becomes of the example configurations in the repositories of six frameworks, as written by",
        "`benchmarks/read_configs.py`; `tests/data/configs/index.json` has the verdict on each file. Files are read as",
        "they are, with a model given to those that name none. Of the files whose architecture, engine and method",
        f"ligerprof has: **{share(rows)}**.",
        "",
        "| repository, commit | files | recipe | lacks a part | refused | not read | unknown keys |",
        "|---|---|---|---|---|---|---|",
    ]
    for repository, group in grouped(rows, "repository"):
        counts = collections.Counter(row["verdict"] for row in group)
        numbers = (len(group), *(counts[word] for word in ("recipe", "lacks", "refused", "not read")))
        unknown = sum(bool(row.get("unknown")) for row in group)
        cells = " | ".join(map(str, (*numbers, unknown)))
        lines.append(f"| {repository}, {group[0]['commit'][:10]} | {cells} |")
    lines += [
        "",
        "The files that are not read do not configure a training run, have placeholders for values, or are functions",
        "of torchtitan that need another package or a GPU to be called.",
        "",
        "## Refused, with all parts there",
        "",
    ]
    refused = [row for row in rows if row["verdict"] == "refused"]
    lines += [f"- `{row['repository']}/{row['path']}`: {feature_of(row['reason'])}" for row in refused]
    lines += ["", "## What the others lack", "", "| files | lacking |", "|---|---|"]
    lacking = collections.Counter(feature_of(row["reason"]) for row in rows if row["verdict"] == "lacks")
    lines += [f"| {number} | {reason.replace('|', chr(92) + '|')} |" for reason, number in lacking.most_common()]
    return "\n".join(lines) + "\n"


def print_summary(rows: list[dict[str, Any]]) -> None:
    read = [row for row in rows if row["verdict"] != "not read"]
    clean = [row for row in read if not row["unknown"]]
    print(f"{len(rows)} files, {len(read)} recognized, {len(clean)} of them without an unknown key")
    for repository, group in grouped(rows, "repository"):
        verdicts = collections.Counter(row["verdict"] for row in group)
        unknown = sum(bool(row["unknown"]) for row in group)
        print(f"{repository}: {dict(verdicts)}, {unknown} with unknown keys")
    for verdict_ in ("refused", "lacks"):
        reasons = collections.Counter(feature_of(row["reason"]) for row in rows if row["verdict"] == verdict_)
        print(f"{verdict_}:")
        for reason, number in reasons.most_common():
            print(f"{number:5} {reason}")
    print(share(rows))


def share(rows: list[dict[str, Any]]) -> str:
    """The share of recipes among files whose architecture, engine and method ligerprof has."""
    recipes, refused = (sum(row["verdict"] == verdict_ for row in rows) for verdict_ in ("recipe", "refused"))
    return f"{recipes} recipes of {recipes + refused} files: {recipes / max(1, recipes + refused):.1%}"


def grouped(rows: list[dict[str, Any]], key: str) -> list[tuple[str, list[dict[str, Any]]]]:
    names = dict.fromkeys(row[key] for row in rows)
    return [(name, [row for row in rows if row[key] == name]) for name in names]


if __name__ == "__main__":
    main()
