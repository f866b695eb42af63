"""The classes of commands, whose help has examples and options in groups."""

from collections.abc import Mapping, Sequence

import click

from ligerprof.cli.examples import EXAMPLES

_OPTIONS, _OUTPUT, _EXAMPLES = "Options", "Output", "Examples"
# arguments of options that decide what is printed or written, in any command
_OUTPUT_ARGUMENTS = frozenset(
    {
        *("output", "html_path", "figure", "figure_file", "csv_file", "formats", "report"),
        *("force", "top", "as_markdown", "as_json"),
    }
)


class DocumentedCommand(click.Command):
    """A command whose help shows its examples, then its options in groups."""

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

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples, options and subcommands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)
