import re
from pathlib import Path

import pytest

from ligerprof.cli.main import COMMANDS
from tests.paths import REPOSITORY

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")
# code may hold what looks like a link: kernel[grid](...)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
SOURCE_PATH = re.compile(r"\b(?:ligerprof|benchmarks|tests)/[a-z_0-9/]+\.py\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    links = LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_source_files_that_texts_mention_exist() -> None:
    scripts = (REPOSITORY / "benchmarks").glob("*.*")
    mentioned = {path for page in (*PAGES, *scripts) for path in SOURCE_PATH.findall(page.read_text(encoding="utf-8"))}
    assert "ligerprof/gpus.py" in mentioned
    assert [path for path in sorted(mentioned) if not (REPOSITORY / path).exists()] == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_a_page_in_the_index(name: str) -> None:
    index = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| `ligerprof {name}` \| \[[^]]+\]\([^)]+\.md\)", index, flags=re.MULTILINE)
