"""Commands of the documentation run, or are marked as needing a GPU; they print what the page shows below them."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ligerprof.cli.main import main
from ligerprof.kernels import registry
from tests.docs_commands import PAGES, Shown, build_folder, fences, missing_lines, shown_commands
from tests.paths import DATA, REPOSITORY

COMMANDS = {page: shown_commands(page.read_text(encoding="utf-8")) for page in PAGES}
# a line in a block without a language that looks like a command
UNMARKED = re.compile(r"^(\$ |ligerprof [a-z]|make [a-z]|pip install|torchrun |accelerate |deepspeed [a-z]|LIGERPROF=)")
INLINE = re.compile(r"`ligerprof ([a-z]+)((?: [^`\n]+)?)`")
# last values win: the same command for a small model
TINY = ("--model", "tiny", "--seq", "64", "--batch", "2")
QUICK = {
    "step": (*TINY, "--device", "simulated", "--force"),
    "sweep": ("--dry-run",),
    "study": ("--dry-run",),
    "fit": (*TINY, "--no-simulate"),
    "advise": (*TINY, "--no-simulate"),
    "plot": ("--force",),
}
# drawing, searching and many ranks take most of the time
SLOW = {f"docs/{name}.md" for name in ("bench", "fit", "plot", "several-gpus", "simulation", "study")}
# these end with Ctrl-C; tests/cli/test_view.py runs it
SERVERS = {"view"}


def name_of(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    build_folder(folder)
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh copy, the current folder; commands of a page may read what those before it wrote."""
    copy = tmp_path / "docs"
    shutil.copytree(prepared, copy, symlinks=True)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("COLUMNS", "100")
    # of an activated environment
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    # the example plug-in, as if it were installed
    monkeypatch.syspath_prepend(str(DATA / "plugin"))
    plugin = EntryPoint(name="example", value="ligerprof_example_plugin.spec:SPECS", group="ligerprof.kernels")
    found = registry.build_registry([plugin])
    monkeypatch.setattr(registry, "load_registry", lambda: found)
    return copy


def command_of(words: Sequence[str]) -> click.Command:
    command = main.get_command(click.Context(main), words[0])
    assert command is not None, f"no command {words[0]}"
    return command


def unknown_options(words: Sequence[str]) -> list[str]:
    """The options of a command line that its command lacks; what follows `--` belongs to another program."""
    own = words[: words.index("--")] if "--" in words else words
    known = {flag for parameter in command_of(words).params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return [word for word in own if re.match(r"-[a-z-]", word) and word.partition("=")[0] not in known | {"--help"}]


def run(shown: Shown, more: Sequence[str]) -> str:
    result = CliRunner().invoke(main, [*shown.words[1:], *more])
    assert result.exit_code in shown.exit_codes, f"{shown.line}\n{result.output}"
    assert result.exception is None or isinstance(result.exception, SystemExit)
    if shown.redirected:
        Path(shown.redirected).write_text(result.stdout, encoding="utf-8")
    return result.stdout


def quick_words(words: Sequence[str]) -> Sequence[str]:
    if words[1] == "estimate" and "--simulate" in words:
        return TINY
    return QUICK.get(words[1], ())


def marked(page: Path) -> object:
    return pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] if name_of(page) in SLOW else [])


@pytest.mark.parametrize("page", [marked(page) for page in PAGES if COMMANDS[page]])
def test_every_command_of_a_page_runs(page: Path, folder: Path) -> None:
    check(COMMANDS[page], quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if COMMANDS[page]], ids=name_of)
def test_every_command_of_a_page_runs_as_it_is_written(page: Path, folder: Path) -> None:
    check(COMMANDS[page], quick=False)


def check(commands: Sequence[Shown], *, quick: bool) -> None:
    for shown in commands:
        program, *words = shown.words
        if program != "ligerprof":
            check_other(shown)
            continue
        assert unknown_options(words) == [], shown.line
        if shown.needs_gpu or words[0] in SERVERS or (quick and words[:2] == ["kernels", "check"]):
            continue
        # searches without simulated steps are quick as they are
        as_written = not quick or (shown.output is not None and "--no-simulate" in words)
        more = quick_words(shown.words) if not as_written else ("--force",) if words[0] in ("plot", "step") else ()
        printed = run(shown, more)
        if shown.output is not None and set(more) <= {"--force"}:
            assert missing_lines(shown.output, printed) == [], f"{shown.line} prints\n{printed}"


def check_other(shown: Shown) -> None:
    """Programs other than ligerprof are not run: their targets, scripts and extras must exist."""
    program, *words = shown.words
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in words if "=" not in word} <= targets, shown.line
    elif program == "python" and words[0] != "-m":
        assert (REPOSITORY / words[0]).exists(), shown.line
    elif program in ("pip", ".venv/bin/pip"):
        extras = re.findall(r"^(\w+) = \[", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
        named = {extra for group in re.findall(r"\[([^]]+)\]", shown.line) for extra in group.split(",")}
        assert named <= set(extras), shown.line
    else:
        assert shown.needs_gpu or program in ("git", "cd", "."), f"{shown.line}: not run by a test"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_in_blocks_that_are_tested(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    unmarked = [body for kind, body in fences(text) if kind in ("", "text")]
    assert [line for body in unmarked for line in body.splitlines() if UNMARKED.match(line)] == []
    for name, rest in INLINE.findall(text):
        assert unknown_options([name, *rest.split()]) == []
