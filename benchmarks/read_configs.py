"""Read every example configuration of frameworks' repositories and write down what became of it.

    python benchmarks/read_configs.py CHECKOUTS [-o index.json]

CHECKOUTS is a folder with one checkout per repository, named OWNER+NAME. The table says of each file whose it is,
how many of its keys are unknown, and whether it becomes a recipe or what it is refused for. A file without a model, or
with one that is not in the catalog, is read a second time with a small model in its place. torchtitan's configurations
are functions of its modules: they are read where torchtitan can be imported.
"""

import argparse
import ast
import collections
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ligerprof.errors import LigerprofError, UnknownModelError
from ligerprof.recipe.configs.load import load_recipe
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    output = arguments.output and arguments.output.resolve()
    rows = [row for repository in PLACES for row in read_repository(arguments.checkouts.resolve() / repository)]
    if output is not None:
        write_index(rows, output)
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
    given: dict[str, Any] = {}
    for _ in range(2):
        try:
            recipe, _ = load_recipe([path], given)
        except UnknownModelError as error:
            given = {"model": SUBSTITUTE}
            unknown_model = str(error).partition("unknown model ")[2].partition(":")[0]
        except LigerprofError as error:
            return {"verdict": "refused", "reason": str(error), **model_note(given, locals())}
        else:
            return {"verdict": "recipe", "summary": recipe.summary, **model_note(given, locals())}
    raise AssertionError(path)


def model_note(given: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    return {"unknown_model": values["unknown_model"]} if given else {}


def print_summary(rows: list[dict[str, Any]]) -> None:
    read = [row for row in rows if row["verdict"] != "not read"]
    clean = [row for row in read if not row["unknown"]]
    print(f"{len(rows)} files, {len(read)} recognized, {len(clean)} of them without an unknown key")
    for repository, group in grouped(rows, "repository"):
        verdicts = collections.Counter(row["verdict"] for row in group)
        unknown = sum(bool(row["unknown"]) for row in group)
        print(f"{repository}: {dict(verdicts)}, {unknown} with unknown keys")
    reasons = collections.Counter(reason_of(row) for row in rows if row["verdict"] == "refused")
    for reason, number in reasons.most_common():
        print(f"{number:5} {reason}")


def reason_of(row: dict[str, Any]) -> str:
    """The reason of a refusal without its file and key."""
    return str(row["reason"]).rpartition(" is not supported yet")[0].rpartition(": ")[2] or str(row["reason"])


def grouped(rows: list[dict[str, Any]], key: str) -> list[tuple[str, list[dict[str, Any]]]]:
    names = dict.fromkeys(row[key] for row in rows)
    return [(name, [row for row in rows if row[key] == name]) for name in names]


if __name__ == "__main__":
    main()
