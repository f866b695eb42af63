"""`ligerprof mcp`, used through the client of the protocol's SDK."""

import sys
from collections.abc import Mapping
from typing import Any

import pytest

from ligerprof.cli.main import COMMANDS
from ligerprof.cli.mcp import TOOLS
from tests.paths import RECORDINGS, REPOSITORY

pytest.importorskip("mcp")
import anyio
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

SMALL, OTHER = (f"{RECORDINGS}/small-{name}.pickle.xz" for name in ("lora", "own-all"))
RECIPE = {"model": "tiny", "batch": 2, "seq": 128}
CALLS: list[tuple[str, Mapping[str, Any]]] = [
    ("explain", {"snapshot": SMALL}),
    ("diff", {"before": SMALL, "after": OTHER, "options": {"max_growth": "1000%"}}),
    ("estimate", {"options": {**RECIPE, "memory-limit": "10MiB", "checkpointing": True}}),
    ("estimate", {"command": "trl sft --model_name_or_path Qwen/Qwen3-0.6B --max_length 512"}),
    ("fit", {"options": {**RECIPE, "--memory-limit": "1GiB", "no-simulate": True}}),
    ("advise", {"options": {**RECIPE, "memory-limit": "1GiB", "no-simulate": True}}),
    ("explain", {}),
    ("explain", {"snapshot": "missing.pickle"}),
    ("estimate", {"options": {"modle": "tiny"}}),
    ("estimate", {"options": ["tiny"]}),
    ("shutdown", {}),
]


def test_the_tools_answer_what_the_commands_print() -> None:
    async def talk() -> tuple[list[Any], list[Any]]:
        server = StdioServerParameters(command=sys.executable, args=["-m", "ligerprof", "mcp"], cwd=str(REPOSITORY))
        async with Client(stdio_client(server)) as client:
            tools = (await client.list_tools()).tools
            return tools, [await client.call_tool(name, dict(arguments)) for name, arguments in CALLS]

    tools, results = anyio.run(talk)

    assert [tool.name for tool in tools] == list(TOOLS)
    assert set(TOOLS) <= set(COMMANDS)
    # an agent reads all of it at the beginning
    assert sum(len(tool.model_dump_json()) for tool in tools) < 10_000
    kinds = [result.structured_content["kind"] for result in results[:6]]
    assert kinds == ["peak", "diff", "estimate", "estimate", "fit", "advise"]
    assert [result.is_error for result in results] == [False] * 6 + [True] * 5
    over = results[2]
    assert over.structured_content["fits"] is False
    assert "is more than 10.0 MiB" in over.content[-1].text
    messages = [result.content[-1].text for result in results[6:]]
    assert messages[0] == "explain needs snapshot."
    assert "missing.pickle" in messages[1]
    assert "Did you mean --model?" in messages[2]
    assert messages[3].startswith("options: not an object")
    assert "is no tool" in messages[4]
