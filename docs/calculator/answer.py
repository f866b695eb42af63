"""What the calculator's page asks: `ligerprof` commands on a pasted file, as the command line answers them."""

import io
import json
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from ligerprof.cli.main import main

_COMMANDS = {"estimate": ("estimate", "--json"), "advise": ("advise", "--no-simulate", "--json")}


def answer(text: str) -> str:
    """The result of a request, both as JSON.

    Args:
        text: `command` (estimate or advise), `options` as typed, and optionally a configuration's `file`, its name
            or that of its framework, and its `content`.
    """
    request = json.loads(text)
    words = [*_COMMANDS[request["command"]], *_file_words(request), *shlex.split(request.get("options", ""))]
    printed, said, code = _run(words)
    result: dict[str, Any] | None = json.loads(printed) if printed else None
    lines = [line for line in said.splitlines() if line]
    return json.dumps({"code": code, "result": result, "said": lines}, sort_keys=True)


def _file_words(request: dict[str, Any]) -> list[str]:
    content = request.get("content", "")
    if not content.strip():
        return []
    name = request.get("file") or _guessed(content)
    framework, equals, file = name.rpartition("=")
    # in a folder of its own: what the page calls a file is not a path
    path = Path("pasted") / (Path(file).name or "pasted.yaml")
    path.parent.mkdir(exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return ["--config", f"{framework}{equals}{path}"]


def _guessed(content: str) -> str:
    """A name whose suffix says how the text is written."""
    first = content.lstrip()
    if first.startswith("{"):
        return "pasted.json"
    is_toml = any(line.startswith("[") and line.rstrip().endswith("]") for line in first.splitlines())
    return "pasted.toml" if is_toml else "pasted.yaml"


def _run(words: list[str]) -> tuple[str, str, int]:
    printed, said = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(said):
        try:
            main(words, prog_name="ligerprof")
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    return printed.getvalue(), said.getvalue(), code
