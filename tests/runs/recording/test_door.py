"""The line that Python runs at every start where ligerprof is installed."""

import json
import os
import subprocess
import sys

import pytest

from tests.paths import REPOSITORY

LINE = (REPOSITORY / "ligerprof.pth").read_text(encoding="utf-8")


@pytest.mark.parametrize(("value", "opens"), [(None, False), ("", False), ("oom", True)])
def test_python_starts_without_ligerprof_unless_the_variable_is_set(value: str | None, opens: bool) -> None:
    # no site: its own .pth files may import anything
    code = f"import json, os, sys; before = set(sys.modules); exec({LINE!r})"
    code += "; print(json.dumps(sorted(set(sys.modules) - before)))"
    environment = {name: text for name, text in os.environ.items() if name != "LIGERPROF"}
    environment |= {"PYTHONPATH": str(REPOSITORY)} | ({} if value is None else {"LIGERPROF": value})
    printed = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, env=environment, check=True
    ).stdout
    imported = json.loads(printed)

    assert ("ligerprof.runs.recording.door" in imported) is opens
    assert "torch" not in imported
    if not opens:
        assert imported == []
