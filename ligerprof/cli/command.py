"""The classes of commands, whose help has examples and options in groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from ligerprof.cli.examples import EXAMPLES
from ligerprof.errors import LigerprofError, OutputError
from ligerprof.text import short_repr
from ligerprof.words import did_you_mean, nearest_names, question

_OPTIONS, _OUTPUT, _EXAMPLES = "Options", "Output", "Examples"
# arguments of options that decide what is printed or written, in any command
_OUTPUT_ARGUMENTS = frozenset(
    {
        *("output", "html_path", "figure", "figure_file", "csv_file", "formats", "report"),
        *("force", "top", "as_markdown", "as_json"),
    }
)


class DocumentedCommand(click.Command):
    """A command whose help shows its examples, then its options in groups; it suggests names of options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; the error about an unknown option suggests the nearest."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)]
            # hyphens would make all names alike
            nearest = nearest_names(error.option_name.lstrip("-"), (name.lstrip("-") for name in known), most=1)
            meant = question(f"--{name}" for name in nearest)
            raise click.UsageError(f"No such option {short_repr(error.option_name)}.{meant}", ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; the error about a file of the wrong kind names the command that reads it."""
        try:
            return super().invoke(ctx)
        except LigerprofError as error:
            from ligerprof.cli.signpost import signposted

            given = [value for name, value in ctx.params.items() if name not in _OUTPUT_ARGUMENTS]
            if isinstance(error, OutputError):
                raise
            message = signposted(str(error), given, self.name or "", ctx.params.get("configs", ()))
            if message is None:
                raise
            raise type(error)(message) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, and one section per group of options."""
        if examples := EXAMPLES.get(self.name or ""):
            with formatter.section(_EXAMPLES):
                for example in examples:
                    formatter.write(f"  ligerprof {example.words}\n      {example.text}\n")
        for title, records in self._sections(ctx).items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def _sections(self, ctx: click.Context) -> Mapping[str, Sequence[tuple[str, str]]]:
        """The help records of the options by group."""
        sections: dict[str, list[tuple[str, str]]] = {_OPTIONS: [], _OUTPUT: []}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(self.group_of(parameter), []).append(record)
        return sections

    def group_of(self, option: click.Option) -> str:
        """The heading of an option."""
        return _OUTPUT if option.name in _OUTPUT_ARGUMENTS else _OPTIONS


class DocumentedGroup(DocumentedCommand, click.Group):
    """A command with subcommands, which its help lists last."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand; the error about an unknown one suggests the nearest."""
        name = args[0]
        if not name.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            meant = did_you_mean(name, self.list_commands(ctx), most=1)
            raise click.UsageError(f"No such command {short_repr(name)}.{meant}", ctx)
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples, options and subcommands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)
