"""The layout's rules, held against every file of the package."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ligerprof
from ligerprof.cli.main import COMMANDS

PACKAGE = Path(ligerprof.__file__).parent
REPOSITORY = PACKAGE.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
SOURCE_SET = frozenset(SOURCES)

# a module may import from its own layer and from those above it in this list
LAYERS = (
    ("errors", "units", "text", "files", "words", "serialization", "lazy_names", "own_process", "version"),
    ("roles", "gpus"),
    ("torch_memory",),
    ("models",),
    ("kernels",),
    ("recipe",),
    ("snapshots",),
    ("analyzers",),
    ("runs", "simulated_gpu"),
    ("library",),
    ("reports",),
    ("cli", "__main__", "notebook", "pytest_plugin"),
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
MAX_LINES = 800
HEAVY = ("torch", "triton", "transformers", "deepspeed", "peft", "matplotlib")
# what a help text or a completion has no use for, and would wait for
UNUSED_BY_HELP = ("numpy", "rich", "ligerprof.library", "ligerprof.reports.terminal", "ligerprof.analyzers.estimate")


def identify(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def named_module(node: ast.AST) -> list[str]:
    """The module that `import_module("ligerprof...")` names, if the node is such a call."""
    if not isinstance(node, ast.Call) or not node.args or not ast.unparse(node.func).endswith("import_module"):
        return []
    name = node.args[0]
    return [name.value] if isinstance(name, ast.Constant) and isinstance(name.value, str) else []


def first_party_imports(source: str, module: str) -> Iterator[tuple[int, str]]:
    """Line and layer of every import of the package's own modules, those inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively: write the whole name"
            # `from ligerprof import recipe` names a module of the package, not of `ligerprof/__init__.py`
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            targets = named_module(node)
        for target in targets:
            parts = target.split(".")
            if parts[0] == "ligerprof" and len(parts) > 1 and parts[1] in RANKS:
                yield node.lineno, parts[1]


def test_imports_point_one_way() -> None:
    wrong = [
        f"{identify(path)}:{line}: {layer} imports {imported}"
        for path in SOURCES
        for layer in (path.relative_to(PACKAGE).parts[0].removesuffix(".py"),)
        if layer in RANKS
        for line, imported in first_party_imports(path.read_text(encoding="utf-8"), identify(path))
        if RANKS[imported] > RANKS[layer]
    ]
    assert wrong == []


def test_every_module_has_a_layer() -> None:
    top_level = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in SOURCES}
    assert top_level - {"__init__"} <= set(RANKS)


def test_the_import_test_sees_what_it_should() -> None:
    source = (
        "def late():\n"
        "    from ligerprof import cli\n"
        "    import ligerprof.runs.step\n"
        "    from ligerprof import __version__\n"
        "    importlib.import_module('ligerprof.reports.shown')\n"
    )
    assert list(first_party_imports(source, "example")) == [(2, "cli"), (3, "runs"), (5, "reports")]


def test_files_open_with_a_sentence_and_stay_readable() -> None:
    wrong = []
    for path in SOURCES:
        source = path.read_text(encoding="utf-8")
        summary = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].rstrip()
        if not summary.endswith((".", "?")):
            wrong.append(f"{identify(path)}: the docstring's first line is not a whole sentence")
        # Triton bodies are long by nature
        if path.name != "triton.py" and source.count("\n") > MAX_LINES:
            wrong.append(f"{identify(path)}: more than {MAX_LINES} lines")
    assert wrong == []


def imported_modules(path: Path) -> set[Path]:
    """Files of the package that a file imports, also inside functions and under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        choices = [[name] for name in named_module(node)]
        if isinstance(node, ast.Import):
            choices = [[alias.name] for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            # a package's own module is not an import of the package
            choices = [[f"{node.module}.{alias.name}", node.module] for alias in node.names]
        for names in choices:
            targets = [REPOSITORY.joinpath(*name.split(".")) for name in names]
            files = [file for target in targets for file in (target.with_suffix(".py"), target / "__init__.py")]
            found |= set([file for file in files if file in SOURCE_SET][:1])
    return found - {path}


def test_imports_run_in_no_circle() -> None:
    waiting = {path: imported_modules(path) for path in SOURCES}
    while free := {path for path, imports in waiting.items() if not imports & waiting.keys()}:
        waiting = {path: imports for path, imports in waiting.items() if path not in free}
    # what imports a circle waits for it, too: keep those that something in the rest imports
    while tips := {path for path in waiting if not any(path in imports for imports in waiting.values())}:
        waiting = {path: imports for path, imports in waiting.items() if path not in tips}
    assert sorted(map(identify, waiting)) == []


def test_nothing_is_left_to_do() -> None:
    marker = "TO" + "DO"
    files = [*SOURCES, *(REPOSITORY / "tests").rglob("*.py"), *(REPOSITORY / "docs").rglob("*.md")]
    assert [str(path) for path in files if marker in path.read_text(encoding="utf-8")] == []


def heavy_modules_after(*commands: list[str], unused: tuple[str, ...] = ()) -> list[tuple[list[str], int, list[str]]]:
    """Each command with its exit code and the heavy packages imported by its end, run in turn in one process.

    Args:
        commands: the words of each command.
        unused: modules that count as heavy as well.
    """
    code = (
        "import json, sys\n"
        "from ligerprof.cli.main import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        main(arguments)\n"
        "    except SystemExit as stop:\n"
        "        status = stop.code\n"
        f"    heavy = [name for name in {HEAVY + unused!r} if name in sys.modules]\n"
        "    print(json.dumps([arguments, status, heavy]), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=REPOSITORY,
    )
    return [tuple(json.loads(line)) for line in done.stderr.splitlines() if line.startswith("[[")]


def test_help_imports_nothing_heavy() -> None:
    commands = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
    found = heavy_modules_after(*commands, unused=UNUSED_BY_HELP)
    assert found == [(arguments, 0, []) for arguments in commands]


SNAPSHOTS = "tests/data/snapshots"


def test_what_needs_no_torch_imports_none() -> None:
    commands = [
        ["models"],
        ["estimate"],
        ["estimate", "--json", "--liger", "all", "--no-checkpointing"],
        ["explain", f"{SNAPSHOTS}/hf-ckpt-4x1024.pickle.xz"],
        ["trace", "tests/data/traces/llama3.2-1b-step.pt.trace.json.xz"],
        ["compare", f"{SNAPSHOTS}/hf-ckpt-4x1024.pickle.xz", f"{SNAPSHOTS}/liger-flce-ckpt-4x1024.pickle.xz"],
    ]
    assert heavy_modules_after(*commands) == [(arguments, 0, []) for arguments in commands]


def test_what_the_calculator_runs_takes_only_the_standard_library_click_and_yaml() -> None:
    commands = [
        ["estimate", "--model", "llama3.2-1b", "--gpu", "h100", "--json"],
        ["estimate", "--config", "docs/examples/sft.yaml", "--gpu", "h100", "--json"],
        ["advise", "--model", "llama3.2-1b", "--gpu", "h100", "--no-simulate", "--json"],
    ]
    assert heavy_modules_after(*commands, unused=("numpy", "rich")) == [(arguments, 0, []) for arguments in commands]
