"""`ligerprof mcp`: the commands that answer questions about memory, as tools for agents."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ligerprof.cli.command import DocumentedCommand
from ligerprof.errors import DoesNotFitError, MissingDependencyError, RecipeError
from ligerprof.text import short_repr
from ligerprof.version import __version__

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server

# tool: its command's arguments that have no option's name
TOOLS: Mapping[str, Sequence[str]] = {
    "explain": ("snapshot",),
    "diff": ("before", "after"),
    "estimate": ("command",),
    "fit": (),
    "advise": (),
}
# a line of a shell, which the command reads itself
_OPTIONAL = "command"
_WITH_RESULT = (0, DoesNotFitError.exit_code)
_INSTRUCTIONS = (
    "GPU memory of LLM training: explain what a recorded peak consists of, estimate a run, find what fits a GPU, and"
    " what to change. Sizes in results are bytes. `fits` is null where it is not known; `verdict` says more."
)


@click.command(cls=DocumentedCommand, name="mcp")
def command() -> None:
    """Serve explain, diff, estimate, fit and advise as tools of the Model Context Protocol, over stdin and stdout.

    Each tool runs its command in a process of its own, and returns what --json prints. Paths are those of the folder
    in which the server runs. It needs the package mcp: pip install mcp.
    """
    try:
        import anyio
        from mcp.server.stdio import stdio_server
    except ImportError:
        raise MissingDependencyError("mcp is not installed. Install it with: pip install mcp.") from None

    async def serve() -> None:
        server = make_server()
        async with stdio_server() as (received, sent):
            await server.run(received, sent, server.create_initialization_options())

    anyio.run(serve)


def make_server() -> "Server[Any]":
    """The server, with a tool for each command."""
    import mcp_types as types
    from mcp.server.lowlevel import Server

    async def list_tools(*_: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool.model_validate(tool) for tool in map(describe, TOOLS)])

    async def call_tool(_: Any, called: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            result, said, failed = await _run(called.name, called.arguments or {})
        except RecipeError as error:
            result, said, failed = None, str(error), True
        texts = [said] if result is None else [json.dumps(result), *([said] if said else [])]
        content: list[Any] = [types.TextContent(type="text", text=text) for text in texts]
        return types.CallToolResult(content=content, structured_content=result, is_error=failed)

    return Server(
        "ligerprof", version=__version__, instructions=_INSTRUCTIONS, on_list_tools=list_tools, on_call_tool=call_tool
    )


def describe(name: str) -> dict[str, Any]:
    """A tool as the protocol describes it: the command's help, its arguments, and its options as one object."""
    from ligerprof.cli.main import COMMANDS, main

    found = main.get_command(click.Context(main), name)
    named = [
        option.opts[0].lstrip("-")
        for option in (found.params if found is not None else ())
        if isinstance(option, click.Option) and option.name not in ("as_json", "as_markdown")
    ]
    options = {
        "type": "object",
        "description": (
            "The command's options without dashes: true for a flag, a list for one that repeats, such as"
            ' {"model": "llama3.2-1b", "batch": 4, "gpu": "rtx4090", "config": ["sft.yaml"]}. There are: '
            + ", ".join(named)
        ),
    }
    arguments = {each: {"type": "string"} for each in TOOLS[name]}
    required = [each for each in arguments if each != _OPTIONAL]
    return {
        "name": name,
        "description": f"{COMMANDS[name][1]} {(found.help or '') if found is not None else ''}",
        "inputSchema": {"type": "object", "properties": {**arguments, "options": options}, "required": required},
    }


def command_words(name: str, given: Mapping[str, Any]) -> list[str]:
    """The words after `ligerprof` that a call means; raises RecipeError for an unknown tool or wrong arguments."""
    if name not in TOOLS:
        raise RecipeError(f"{short_repr(name)} is no tool. The tools are {', '.join(TOOLS)}.")
    options = given.get("options") or {}
    arguments = [str(given[each]) for each in TOOLS[name] if given.get(each)]
    if not isinstance(options, Mapping):
        raise RecipeError('options: not an object. Pass such as {"model": "llama3.2-1b"}.')
    if missing := [each for each in TOOLS[name] if each != _OPTIONAL and not given.get(each)]:
        raise RecipeError(f"{name} needs {' and '.join(missing)}.")
    return [name, "--json", *_option_words(options), *(["--", *arguments] if arguments else [])]


def _option_words(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        option = "--" + name.lstrip("-").replace("_", "-")
        for each in value if isinstance(value, list) else [value]:
            if each is True:
                yield option
            elif each not in (False, None):
                yield f"{option}={each}"


async def _run(name: str, given: Mapping[str, Any]) -> tuple[Any, str, bool]:
    """The JSON of a command, None if it printed none; its last line on stderr; and whether it failed."""
    import anyio

    words = [sys.executable, "-m", "ligerprof", *command_words(name, given)]
    done = await anyio.run_process(words, check=False, input=b"")
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    failed = done.returncode not in _WITH_RESULT
    said = lines[-1] if lines and done.returncode else ""
    return (None if failed else json.loads(done.stdout)), said, failed
