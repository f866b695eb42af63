import re
from pathlib import Path

import pytest

from ligerprof.cli.main import COMMANDS
from tests.paths import REPOSITORY

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")
# code may hold what looks like a link: kernel[grid](...)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    links = LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_a_page_in_the_index(name: str) -> None:
    index = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| `ligerprof {name}` \| \[[^]]+\]\([^)]+\.md\)", index, flags=re.MULTILINE)
