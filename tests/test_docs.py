"""Links and names in the documentation, and what the site makes from the code."""

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import click
import pytest

import ligerprof
from ligerprof.cli.main import COMMANDS, main
from ligerprof.recipe.training import RECIPE_OPTIONS
from tests.paths import REPOSITORY

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")
# code may hold what looks like a link: kernel[grid](...)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
SOURCE_PATH = re.compile(r"\b(?:ligerprof|benchmarks|tests)/[a-z_0-9/]+\.py\b")
# such as `torch_memory/softmax.py`, and files in tables about one folder of the package
PACKAGE_PATH = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9]+\.py)")
TABLE_OF_FOLDER = re.compile(r"^\|.*\bin `(ligerprof/[a-z_/]+)/`.*\n((?:\|.*\n)+)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    links = LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_source_files_that_texts_mention_exist() -> None:
    scripts = (REPOSITORY / "benchmarks").glob("*.*")
    mentioned = {path for page in (*PAGES, *scripts) for path in SOURCE_PATH.findall(page.read_text(encoding="utf-8"))}
    assert "ligerprof/gpus.py" in mentioned
    folders = {path.name for path in (REPOSITORY / "ligerprof").iterdir() if path.is_dir()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        mentioned |= {f"ligerprof/{path}" for path in PACKAGE_PATH.findall(text) if path.partition("/")[0] in folders}
        for folder, rows in TABLE_OF_FOLDER.findall(text):
            mentioned |= {f"{folder}/{name}" for name in re.findall(r"`(\w+\.py)`", rows)}
    assert {"ligerprof/analyzers/estimate/tape.py", "ligerprof/torch_memory/attention.py"} <= mentioned
    assert [path for path in sorted(mentioned) if not (REPOSITORY / path).exists()] == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_a_page_in_the_index(name: str) -> None:
    index = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| `ligerprof {name}` \| \[[^]]+\]\([^)]+\.md\)", index, flags=re.MULTILINE)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What the site makes from the code; `make docs` builds the rest."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs" / "_site"))
    return import_module("reference")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_site_lists_every_option_of_a_command_or_links_to_it(name: str, reference: ModuleType) -> None:
    page = reference.options_of_command(name)
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for parameter in command.params:
        declared = (parameter.name or "").removeprefix("no_") in RECIPE_OPTIONS
        if isinstance(parameter, click.Option) and not parameter.hidden and not declared:
            assert max(parameter.opts, key=len) in page


def test_the_site_shows_json_of_every_command_but_servers_and_launchers(reference: ModuleType) -> None:
    shown = {example.split()[0] for example in reference.JSON_EXAMPLES}
    assert shown == set(COMMANDS) - {"view", "run", "watch", "mcp"}


def test_the_site_lists_every_public_name(reference: ModuleType) -> None:
    page = reference.python_page()
    assert [name for name in ligerprof.__all__ if f"## `{name}`\n" not in page] == []
