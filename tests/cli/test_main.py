import importlib
import json
import sys
import types

import click
import pytest
from click.testing import CliRunner

from ligerprof import __version__, errors
from ligerprof.cli.main import COMMANDS, main
from ligerprof.errors import LigerprofError

RUNNER = CliRunner()
ERRORS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, LigerprofError)]


def failing_command(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Make `ligerprof fail` a command that raises."""

    @click.command()
    def command() -> None:
        """Fail."""
        raise error

    module = types.ModuleType("failing_command")
    module.command = command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "failing_command", module)
    monkeypatch.setitem(COMMANDS, "fail", ("failing_command", "Fail."))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_command_loads(name: str) -> None:
    command = importlib.import_module(COMMANDS[name][0]).command
    assert isinstance(command, click.Command)
    assert command.name == name


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_command_documents_every_option(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    undocumented = [
        parameter.name
        for parameter in command.params
        if isinstance(parameter, click.Option) and not (parameter.help or "").strip()
    ]
    assert undocumented == []
    has_json = any(parameter.name == "as_json" for parameter in command.params)
    # what `mcp` prints is the protocol
    assert has_json or name == "mcp", "every command has --json"


def test_help_lists_every_command() -> None:
    result = RUNNER.invoke(main, ["--help"])
    assert result.exit_code == 0
    for name, (_, short_help) in COMMANDS.items():
        assert name in result.stdout
        assert short_help in result.stdout


def test_version() -> None:
    result = RUNNER.invoke(main, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"ligerprof, version {__version__}\n")


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_expected_errors_are_one_line_and_their_exit_code(
    error: type[LigerprofError], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_command(monkeypatch, error("what went wrong. What to try."))
    result = RUNNER.invoke(main, ["fail"])
    assert (result.exit_code, result.stdout, result.stderr) == (
        error.exit_code,
        "",
        "Error: what went wrong. What to try.\n",
    )
    assert error.exit_code in (1, 2, 3)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_command(monkeypatch, ZeroDivisionError("a bug"))
    assert isinstance(RUNNER.invoke(main, ["fail"]).exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["stpe"], "No such command 'stpe'. Did you mean step?"),
        (["kernels", "chek", "rms"], "No such command 'chek'. Did you mean check?"),
        (["models", "--jsno"], "No such option '--jsno'. Did you mean --json?"),
        (["estimate", "--no-checkpoint"], "Did you mean --no-checkpointing?"),
        (["estimate", "--zzz"], "No such option '--zzz'."),
        (["estimate", "--model", "lama3.2-1b"], "Did you mean llama3.2-1b or"),
        (["estimate", "--gpu", "rtx4091"], "Did you mean rtx4090 or"),
        (["estimate", "--precision", "bf61"], "Did you mean bf16?"),
        (["estimate", "--liger", "rms+flcee"], "Did you mean flce?"),
        (["bench", "swigul"], "Did you mean swiglu?"),
        (["explain", "--by", "rol", "x"], "Did you mean role?"),
        (["plot", "--kind", "rols"], "Did you mean roles?"),
        (["models", "qwn3"], "Did you mean qwen3-"),
        (["env", "extra"], "unexpected extra argument"),
        (["estimate", "--liger", "rms+rms"], "twice"),
        (["explain"], "Missing argument"),
        (["explain", "no-such-file.pickle"], "no-such-file.pickle"),
        (["compare", "no-such-run"], "no-such-run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_exit_2_and_says_why(arguments: list[str], says: str) -> None:
    result = RUNNER.invoke(main, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert says in result.stderr
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert "Traceback" not in result.stderr


def test_an_unsupported_option_is_an_expected_error() -> None:
    result = RUNNER.invoke(main, ["step", "--model", "tiny", "--attention", "flash"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: step: --attention flash")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["models", "env", "kernels", "estimate"])
def test_json_is_one_object_with_a_schema_and_nothing_else(name: str) -> None:
    result = RUNNER.invoke(main, [name, "--json"])
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert (printed["schema"], printed["kind"]) == (1, name)
