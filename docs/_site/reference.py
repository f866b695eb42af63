"""The reference part of the site, made from the code: options of every command, JSON of every kind, the Python API."""

import dataclasses
import inspect
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

import ligerprof
from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.cli.main import COMMANDS, main
from ligerprof.gpus import GPUS
from ligerprof.models.names import hub_names, short_names
from ligerprof.recipe.options import Group
from ligerprof.recipe.training import RECIPE_OPTIONS
from ligerprof.reports.page.peak import render_peak_page
from ligerprof.reports.palette import DARK, LIGHT, role_look
from ligerprof.roles import Role

REPOSITORY = Path(__file__).parents[2]
_SNAPSHOTS = "tests/data/snapshots"
_TRACE = "tests/data/traces/llama3.2-1b-step.pt.trace.json.xz"
_SMALL = "--model tiny --batch 2 --seq 128"
# the outputs that the page of JSON keys is made from; {folder} is empty at first
JSON_EXAMPLES = (
    f"explain {_SNAPSHOTS}/small-lora.pickle.xz --stacks",
    f"explain {_SNAPSHOTS}/oom.pickle.xz",
    f"estimate {_SMALL} --gpu rtx4090 --eval-batch 2",
    f"step {_SMALL} --device simulated --gpu rtx4090 -o {{folder}}/run",
    f"step {_SMALL} --device simulated --memory-limit 24MiB -o {{folder}}/failed",
    f"fit {_SMALL} --memory-limit 1GiB --no-simulate",
    f"advise {_SMALL} --memory-limit 64MiB --no-simulate",
    "compare {folder}/run {folder}/failed",
    f"diff {_SNAPSHOTS}/small-lora.pickle.xz {_SNAPSHOTS}/small-own-all.pickle.xz",
    f"sweep {_SMALL} --device simulated --dry-run -o {{folder}}/sweep",
    "study --dry-run -o {folder}/study",
    "plot {folder}/run --kind roles -o {folder}/figures --format svg",
    "bench --from benchmarks/results/kernels-h200.jsonl",
    f"trace {_TRACE}",
    "models",
    "models llama3.2-1b",
    "kernels --model llama3.2-1b",
    "env",
)
# objects whose keys are data: names of roles, phases, packages
_MAPPINGS = frozenset({"roles", "phases", "after_phase", "versions", "evaluation_roles"})
_RECIPE_FLAGS = {flag for option in RECIPE_OPTIONS.values() for flag in (option.flag, option.off_flag) if flag}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


class _Markdown(click.HelpFormatter):
    """Collects the sections of a command's help as tables."""

    def __init__(self) -> None:
        super().__init__()
        self.usage = ""
        self.tables: dict[str, Sequence[tuple[str, str]]] = {}
        self._heading = ""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:  # noqa: ARG002 - click's signature
        self.usage = f"{prog} {args}"

    def write_heading(self, heading: str) -> None:
        self._heading = heading

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:  # noqa: ARG002
        self.tables[self._heading] = rows


def _first_flag(flags: str) -> str:
    return re.split(r"[ ,/]", flags, maxsplit=1)[0]


def options_of_command(name: str) -> str:
    """Usage and options of a command, in the groups of its --help; options of a recipe have a page of their own."""
    context = main.make_context("ligerprof", [name], resilient_parsing=True)
    command = main.get_command(context, name)
    assert command is not None
    formatter = _Markdown()
    command.format_help(click.Context(command, info_name=name, parent=context), formatter)
    lines = ["## All options", "", "```text", formatter.usage, "```", ""]
    recipe_groups = [title for title in formatter.tables if title in set(Group.choices())]
    for title, all_rows in formatter.tables.items():
        rows = [row for row in all_rows if title not in recipe_groups or _first_flag(row[0]) not in _RECIPE_FLAGS]
        if rows:
            lines += [*([] if title == "Options" else [f"### {title}", ""]), "| option | meaning |", "|---|---|"]
            lines += [f"| `{_cell(flags)}` | {_cell(meaning)} |" for flags, meaning in rows]
            lines.append("")
    if recipe_groups:
        links = ", ".join(f"[{title}](recipe.md#{_anchor(title)})" for title in recipe_groups)
        lines += [f"And the options of a recipe: {links}.", ""]
    return "\n".join(lines)


def json_pages(folder: Path) -> dict[str, str]:
    """The keys of every kind of JSON output and a JSON Schema of each; `folder` takes the files of the examples."""
    outputs = [(example, run_example(example, folder)) for example in JSON_EXAMPLES]
    pages = {"reference/json.md": _keys_page(outputs)}
    for kind in {output["kind"] for _, output in outputs}:
        schema = _schema([output for _, output in outputs if output["kind"] == kind])
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": kind}
        pages[f"reference/schema/{kind}.json"] = json.dumps({**head, **schema}, indent=2) + "\n"
    return pages


def _schema(values: Sequence[Any], name: str = "") -> dict[str, Any]:
    """The JSON Schema of the outputs seen: keys that all of them have are required, and null alone says nothing."""
    types = {_type_of(value) for value in values}
    if types <= {"null"}:
        return {}
    types -= {"integer"} if "number" in types else set()
    named = sorted("array" if each == "list" else each for each in types)
    schema: dict[str, Any] = {"type": named[0] if len(named) == 1 else named}
    if objects := [value for value in values if isinstance(value, dict)]:
        if name in _MAPPINGS:
            schema["additionalProperties"] = _schema([item for each in objects for item in each.values()])
        else:
            keys = list(dict.fromkeys(key for each in objects for key in each))
            found = {key: [each[key] for each in objects if key in each] for key in keys}
            schema["properties"] = {key: _schema(items, key) for key, items in found.items()}
            schema["required"] = [key for key in keys if len(found[key]) == len(objects)]
    if lists := [value for value in values if isinstance(value, list)]:
        schema["items"] = _schema([item for each in lists for item in each])
    return schema


def _keys_page(outputs: Sequence[tuple[str, dict[str, Any]]]) -> str:
    lines = [
        "# JSON outputs",
        "",
        "`--json` prints one object to stdout. These are the keys of each `kind`, read from outputs of this version.",
        "`integer (null)` is a number that is null if there is no value. `[]` marks elements of a list,",
        "and `.*` the values of an object whose keys are data, such as roles.",
        "",
    ]
    for kind, (commands, keys) in sorted(_kinds(outputs).items()):
        lines += [f"## `{kind}`", "", *(f"    ligerprof {command} --json" for command in commands), ""]
        lines += [f"As a JSON Schema: [{kind}.json](schema/{kind}.json).", ""]
        lines += ["| key | type | example |", "|---|---|---|"]
        lines += [f"| `{key}` | {_type_text(types)} | {_cell(example)} |" for key, (types, example) in keys.items()]
        lines.append("")
    return "\n".join(lines)


def _kinds(
    outputs: Sequence[tuple[str, dict[str, Any]]],
) -> dict[str, tuple[list[str], dict[str, tuple[set[str], str]]]]:
    kinds: dict[str, tuple[list[str], dict[str, tuple[set[str], str]]]] = {}
    for example, output in outputs:
        commands, keys = kinds.setdefault(str(output["kind"]), ([], {}))
        commands.append(example.replace("{folder}", "runs"))
        for key, value in _walk(output, ""):
            types, shown = keys.get(key, (set(), ""))
            text = "" if isinstance(value, (list, dict)) or value in (None, "") else f"`{json.dumps(value)[:60]}`"
            keys[key] = types | {_type_of(value)}, shown or text
    return kinds


def run_example(example: str, folder: Path) -> dict[str, Any]:
    """The object that a command of JSON_EXAMPLES prints."""
    arguments = [word.replace("{folder}", str(folder)) for word in shlex.split(example)]
    result = CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False)
    if result.exit_code not in (0, 3):
        raise RuntimeError(f"ligerprof {example}: {result.output}")
    output: dict[str, Any] = json.loads(result.stdout)
    return output


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if path:
        yield path, value
    if isinstance(value, dict):
        name = path.rpartition(".")[2]
        for key, item in value.items():
            within = "*" if name in _MAPPINGS else key
            yield from _walk(item, f"{path}.{within}" if path else within)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item, f"{path}[]")


def _type_of(value: Any) -> str:
    return "object" if isinstance(value, dict) else "list" if isinstance(value, list) else _TYPES[type(value)]


def _type_text(types: set[str]) -> str:
    named = " or ".join(sorted(types - {"null"}))
    return f"{named} (null)" if named and "null" in types else named or "null"


def python_page() -> str:
    """Every public name of the package with its signature, types and docstring."""
    lines = [
        "# Python API",
        "",
        "Everything that `import ligerprof` exports. [As a library](../library.md) has examples.",
        "",
    ]
    for name in sorted(ligerprof.__all__, key=str.casefold):
        try:
            value = getattr(ligerprof, name)
        except ImportError as error:
            lines += [f"## `{name}`", "", f"Needs a package that is not installed here: {error.name}.", ""]
            continue
        lines += [f"## `{name}`", "", *_object_lines(name, value)]
    return "\n".join(lines)


def _object_lines(name: str, value: Any) -> Iterator[str]:
    if inspect.ismodule(value):
        yield from _docstring(value)
        for each in sorted(getattr(value, "__all__", ())):
            yield from (f"### `{name}.{each}`", "", *_object_lines(each, getattr(value, each)))
        return
    if callable(value):
        yield from ("```python", _signature(name, value), "```", "")
    yield from _docstring(value)
    if inspect.isclass(value):
        fields = {item.name for item in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
        members = {key: item for key, item in vars(value).items() if not key.startswith("_") and key not in fields}
        described = [(key, item) for key, item in members.items() if isinstance(item, property) or callable(item)]
        if described:
            yield from ("| member | |", "|---|---|")
            for key, item in described:
                target = item.fget if isinstance(item, property) else item
                summary = (inspect.getdoc(target) or "").partition("\n\n")[0]
                shown = key if isinstance(item, property) else f"{key}()"
                yield f"| `{shown}` | {_cell(summary)} |"
            yield ""


def _signature(name: str, value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return f"{name}(...)"
    parameters = [str(each) for each in signature.parameters.values()]
    text = f"{name}({', '.join(parameters)})"
    if len(text) > 100:
        text = f"{name}(\n    " + ",\n    ".join(parameters) + ",\n)"
    returned = signature.return_annotation
    if not inspect.isclass(value) and returned is not inspect.Signature.empty:
        text += f" -> {returned if isinstance(returned, str) else getattr(returned, '__name__', returned)}"
    return re.sub(r"<[^>]*>", "...", text)


def _docstring(value: Any) -> Iterator[str]:
    """A docstring with its sections of arguments, attributes and errors as lists."""
    for line in (inspect.getdoc(value) or "").splitlines():
        if re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields):", line):
            yield from ("", f"**{line[:-1]}**", "")
        elif (entry := re.fullmatch(r"    (\w+): (.*)", line)) is not None:
            yield f"- `{entry[1]}`: {entry[2]}"
        else:
            yield line.strip() if line.startswith("     ") else line
    yield ""


def _anchor(title: str) -> str:
    return re.sub(r"[^\w]+", "-", title.lower()).strip("-")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def example_page() -> str:
    """The page of a recording."""
    recording = REPOSITORY / "tests" / "data" / "snapshots" / "hf-4.45-ckpt-4x1024.pickle.xz"
    return render_peak_page(analyze(recording), source=recording.name)


def calculator_names() -> Mapping[str, Sequence[str]]:
    """The names of models and GPUs that the calculator's form offers."""
    return {"models": [*hub_names(), *short_names()], "gpus": list(GPUS)}


def role_colors() -> str:
    """Style sheet rules for the colors of roles, as pages have them."""
    schemes = ((LIGHT, ":root"), (DARK, '[data-md-color-scheme="slate"]'))
    return "".join(
        f"{selector}{{{''.join(f'--role-{role.value}:{role_look(role, theme).fill};' for role in Role)}}}"
        for theme, selector in schemes
    )


def command_pages(index: str) -> Mapping[str, str]:
    """The page of each command, from the table in index.md."""
    rows = re.findall(r"^\| `ligerprof (\w+)` \| \[[^]]+\]\(([^)]+\.md)\)", index, re.MULTILINE)
    return {page: name for name, page in rows if name in COMMANDS}
