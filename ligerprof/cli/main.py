"""The root command: lists the subcommands, imports each on use, and prints expected errors as one line."""

import atexit
import gc
import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from ligerprof.cli import interrupts
from ligerprof.cli.command import DocumentedGroup
from ligerprof.errors import LigerprofError
from ligerprof.own_process import claim
from ligerprof.snapshots.collector import collector_paused
from ligerprof.text import printable
from ligerprof.version import __version__

# name: (module of `command`, summary in `ligerprof --help`)
COMMANDS: dict[str, tuple[str, str]] = {
    "step": ("ligerprof.cli.step", "Run one profiled training step, on the GPU or simulated."),
    "run": ("ligerprof.cli.run", "Run your own training, and show what its peak memory belongs to."),
    "watch": ("ligerprof.cli.watch", "Show the memory of a running `ligerprof run`."),
    "explain": ("ligerprof.cli.explain", "Show what the memory at a snapshot's peak belongs to."),
    "estimate": ("ligerprof.cli.estimate", "Predict the peak analytically, in milliseconds."),
    "fit": ("ligerprof.cli.fit", "Find the largest batch and sequence that fit a limit."),
    "advise": ("ligerprof.cli.advise", "List the cheapest changes that make a recipe fit."),
    "compare": ("ligerprof.cli.compare", "Compare estimates, runs and snapshots."),
    "diff": ("ligerprof.cli.diff", "Show what grew and shrank between two peaks."),
    "sweep": ("ligerprof.cli.sweep", "Run a grid of steps; out of memory is a result."),
    "study": ("ligerprof.cli.study", "Run the grids of a study file and report them."),
    "plot": ("ligerprof.cli.plot", "Draw figures from sweeps, runs and recordings."),
    "bench": ("ligerprof.cli.bench", "Time kernels side by side and check them against fp64."),
    "trace": ("ligerprof.cli.trace", "Show busy time, gaps and launches of a profiler trace."),
    "view": ("ligerprof.cli.view", "Open a run in TensorBoard with the profiler plugin."),
    "models": ("ligerprof.cli.models", "List models by hub id, and show their figures."),
    "kernels": ("ligerprof.cli.kernels", "List the fused kernels and where they can run."),
    "mcp": ("ligerprof.cli.mcp", "Serve explain, estimate, fit, advise and diff to agents."),
    "env": ("ligerprof.cli.env", "Show package versions and GPUs."),
}


# packages that ligerprof needs, which are imported where they are used
_DEPENDENCIES = frozenset({"torch", "transformers", "triton", "matplotlib", "numpy", "rich", "packaging"})
# they wait for a child process that handles Ctrl-C
_HANDLE_INTERRUPTS = ("run", "view")


class LazyGroup(DocumentedGroup):
    """A group that imports a subcommand's module only when that subcommand is used."""

    _is_process = False

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Every command, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """Import the module of `cmd_name`; None for an unknown command, which click reports."""
        if cmd_name not in COMMANDS:
            return None
        with collector_paused():
            command: click.Command = import_module(COMMANDS[cmd_name][0]).command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands without importing them, and options."""
        found = [CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        """Write the table without importing the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, short_help) for name, (_, short_help) in COMMANDS.items()])

    def main(self, args: Sequence[str] | None = None, *names: Any, **settings: Any) -> Any:
        """Run the command line of this process, or one that a test gives."""
        self._is_process = args is None
        if self._is_process:
            claim()
        return super().main(args, *names, **settings)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand, and import its module."""
        if self._is_process and args[0] not in _HANDLE_INTERRUPTS:
            interrupts.watch()
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand; an expected error becomes one line on stderr and its exit code, an interrupt 130."""
        try:
            return super().invoke(ctx)
        except click.exceptions.Exit:
            raise
        except KeyboardInterrupt:
            self._interrupted(ctx)
        except LigerprofError as error:
            if interrupts.received() and error.exit_code != interrupts.EXIT_CODE:
                self._interrupted(ctx)
            click.echo(f"Error: {printable(str(error))}", err=True)
            self._exit(ctx, error.exit_code)
        except Exception as error:
            # what an interrupt became in code that catches it
            if interrupts.received():
                self._interrupted(ctx)
            if isinstance(error, ModuleNotFoundError) and error.name in _DEPENDENCIES:
                click.echo(
                    f"Error: {error.name} is not installed. Install it with: pip install {error.name}.", err=True
                )
                ctx.exit(LigerprofError.exit_code)
            raise

    def _interrupted(self, ctx: click.Context) -> NoReturn:
        # the terminal shows ^C in the line of the cursor
        click.echo(interrupts.MESSAGE, err=True)
        self._exit(ctx, interrupts.EXIT_CODE)

    def _exit(self, ctx: click.Context, code: int) -> NoReturn:
        if self._is_process and code == interrupts.EXIT_CODE:
            # at its end, Python would send SIGINT to itself after an interrupt in the exec() of a string
            os._exit(code)
        ctx.exit(code)


@click.group(
    cls=LazyGroup, name="ligerprof", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="ligerprof")
def main() -> None:
    """Memory analysis and profiling for LLM training, with pluggable kernels."""
    # the collector's last walk over all objects finds nothing that the end of the process does not free
    atexit.register(gc.freeze)
