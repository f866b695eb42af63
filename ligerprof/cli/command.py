"""The classes of commands, whose help has examples and options in groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from ligerprof.cli.examples import EXAMPLES
from ligerprof.errors import LigerprofError, OutputError
from ligerprof.text import short_repr
from ligerprof.words import did_you_mean, nearest_names, question

HELP_ALL = "ligerprof.help_all"
# what frameworks call options that have another name here
_OTHER_NAMES = {
    **dict.fromkeys(("bs", "mbs", "bsz", "batch-size", "micro-batch", "per-device-train-batch-size"), "batch"),
    **dict.fromkeys(("seqlen", "seq-len", "sequence-len", "max-length", "max-seq-length", "context"), "seq"),
    **dict.fromkeys(("ga", "gas", "gradient-accumulation-steps", "accumulation"), "grad-accum"),
    **dict.fromkeys(("dtype", "bf16", "fp16", "mixed-precision"), "precision"),
    **dict.fromkeys(("model-name-or-path", "base-model", "checkpoint"), "model"),
    **dict.fromkeys(("optim", "optimizers"), "optimizer"),
    **dict.fromkeys(("world-size", "nproc-per-node", "num-processes"), "gpus"),
    **dict.fromkeys(("gradient-checkpointing", "ckpt", "activation-checkpointing"), "checkpointing"),
}
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
            given = error.option_name.lstrip("-")
            nearest = nearest_names(given, (name.lstrip("-") for name in known), most=1)
            if f"--{_OTHER_NAMES.get(given)}" in known:
                nearest = (_OTHER_NAMES[given],)
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
        whole = ctx.meta.get(HELP_ALL, False)
        for title, options in self._sections(ctx).items():
            shown = [option for option in options if not option.hidden]
            if not shown:
                continue
            with formatter.section(title):
                if whole or not self.is_brief(title):
                    formatter.write_dl([record for option in shown if (record := option.get_help_record(ctx))])
                else:
                    formatter.write_text(", ".join(option.opts[-1] for option in shown))
        if not whole and any(map(self.is_brief, self._sections(ctx))):
            formatter.write(f"\n{ctx.command_path} --help-all describes every option.\n")

    def _sections(self, ctx: click.Context) -> Mapping[str, Sequence[click.Option]]:
        """The options by group."""
        sections: dict[str, list[click.Option]] = {_OPTIONS: [], _OUTPUT: []}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option):
                sections.setdefault(self.group_of(parameter), []).append(parameter)
        return sections

    def is_brief(self, group: str) -> bool:  # noqa: ARG002 - for subclasses
        """Whether --help names the options of a group without their descriptions."""
        return False

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
