"""Compare printed reports with files kept under version control; LIGERPROF_REWRITE_GOLDEN=1 rewrites them."""

import os
from pathlib import Path


def assert_matches_golden(text: str, path: Path) -> None:
    """Fail where `text` differs from the file; trailing blanks of a line do not count."""
    printed = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if os.environ.get("LIGERPROF_REWRITE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(printed, encoding="utf-8")
    assert printed == path.read_text(encoding="utf-8"), f"{path.name} differs; LIGERPROF_REWRITE_GOLDEN=1 rewrites it"
