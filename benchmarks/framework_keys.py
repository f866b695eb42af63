"""Compare the keys that ligerprof knows of a framework with the fields of the framework's own classes.

    python benchmarks/framework_keys.py transformers .venv/lib/python3.11/site-packages/transformers "5.23.0"

PACKAGE is the folder of the framework's package, installed or in a checkout; nothing in it is imported. The data file
of the framework, in ligerprof/recipe/configs/keys, is written again: its `source` is the third argument, and `unsorted`
are fields that no table has. A person moves each to the reason why it has no effect on memory, or gives it a row of its
own. Keys that no class has any more are printed: files of older versions have them.
"""

import argparse
import ast
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ligerprof.recipe.configs import rows
from ligerprof.recipe.configs.sources import FRAMEWORKS

KEYS = Path(rows.__file__).with_name("keys")
# of each framework: the section of the data file, its place in the table, and the files with the classes
CLASSES = {
    "transformers": (("", "", "training_args.py"),),
    "trl": (
        ("sft", "", "trainer/sft_config.py trainer/base_config.py"),
        ("", "", "trainer/model_config.py scripts/utils.py:ScriptArguments"),
    ),
    "accelerate": (("", "", "commands/config/config_args.py"),),
    "deepspeed": (
        ("zero_optimization", "zero_optimization", "runtime/zero/config.py"),
        ("offload", "zero_optimization.offload_optimizer", "runtime/zero/offload_config.py"),
    ),
    "axolotl": (("", "", "utils/schemas/*.py integrations/*/args.py"),),
    "llama-factory": (("", "", "hparams/*.py"),),
}
TABLES = {"trl": "trl-sft"}


def main() -> None:
    """Write the data file of one framework again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("framework", choices=sorted(CLASSES))
    parser.add_argument("package", type=Path)
    parser.add_argument("source", help="what was read: a version, or a repository with its commit")
    arguments = parser.parse_args()
    path = KEYS / f"{arguments.framework}.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    unsorted = {}
    for section, place, files in CLASSES[arguments.framework]:
        fields = [name for pattern in files.split() for name in fields_of(arguments.package, pattern)]
        if not fields:
            raise SystemExit(f"{arguments.package}: no classes in {files}. Give the folder of the package.")
        table = table_of(TABLES.get(arguments.framework, arguments.framework), place)
        if new := sorted(set(fields) - set(table)):
            unsorted[section] = new
            print(f"{section or 'top level'}: sort {', '.join(new)}")
        ours = {name for names in content["sections"][section].values() for name in names}
        print(f"{section or 'top level'}: in no class any more: {', '.join(sorted(ours - set(fields))) or 'none'}")
    content.pop("unsorted", None)
    written = {**content, "source": arguments.source, **({"unsorted": unsorted} if unsorted else {})}
    path.write_text(text_of(written), encoding="utf-8")


def text_of(content: dict[str, Any]) -> str:
    """A data file: JSON with several names on a line."""

    def filled(found: re.Match[str]) -> str:
        indent = found[1] + " "
        names = " ".join(found[2].split())
        if len(names) < 90:
            return f"[{names}]"
        lines = textwrap.fill(names, 118, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        return f"[\n{lines}\n{found[1]}]"

    text = json.dumps(content, indent=1, ensure_ascii=False)
    return re.sub(r"\[\n( *) ([^\[\]{}]*?)\n *\]", filled, text) + "\n"


def fields_of(package: Path, pattern: str) -> Iterator[str]:
    """The annotated fields of all classes, or of the one after a colon, in the files that match a pattern."""
    pattern, _, chosen = pattern.partition(":")
    for file in sorted(package.glob(pattern)):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and chosen in ("", node.name):
                for statement in node.body:
                    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                        # pydantic's name of a key whose field has another one
                        given = getattr(statement.value, "keywords", ())
                        aliases = [word.value.value for word in given if word.arg == "alias"]
                        yield aliases[0] if aliases else statement.target.id


def table_of(framework: str, place: str) -> rows.Table:
    """The table of a framework at the top level or of a section."""
    table = next(each.rows for each in FRAMEWORKS if each.name == framework)
    for name in filter(None, place.split(".")):
        table = table[name].children or {}
    return table


if __name__ == "__main__":
    main()
