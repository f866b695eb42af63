"""The classes of commands, whose help has examples and options in groups, and these examples."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from ligerprof.errors import LigerprofError, OutputError
from ligerprof.text import short_repr
from ligerprof.words import did_you_mean, nearest_names, question

# by command: command lines without `ligerprof`, and what each is for; tests/cli/test_examples.py runs them
EXAMPLES: Mapping[str, Mapping[str, str]] = {
    "ligerprof": {
        "explain snapshot.pickle": "What the memory at the peak of a recording belongs to.",
        "run -- python train.py": "The same for your own training, which it records.",
        "estimate --model llama3.1-8b --gpu h200": "What a training will need, before it runs.",
    },
    "watch": {"watch runs/001 --once": "The newest figures of a running `ligerprof run`."},
    "step": {
        "step --model llama3.2-1b --liger flce": "A 1B model with the fused loss, on the GPU or simulated.",
        "step --model tiny --memory-limit 70MiB -o runs/small": "With a limit on its memory, which may run out.",
    },
    "run": {
        "run -- python train.py": "Record your own training.",
        "run --steps 2:3 -- accelerate launch train.py": "Record two steps of each rank.",
    },
    "explain": {
        "explain snapshot.pickle": "Roles, then blocks, at the peak of a recording.",
        "explain runs/001 --by layer --html peak.html": "A run layer by layer, and as a page.",
        "explain snapshot.pickle --max-peak 20GiB": "For CI: exit code 3 if the peak is above 20 GiB.",
    },
    "estimate": {
        "estimate --model llama3.1-8b --precision bf16 --gpu h200": "Whether a recipe fits a GPU.",
        "estimate --model Qwen/Qwen3-4B --lora 16 --gpu 4090 --by layer": "LoRA on a 24 GB card, layer by layer.",
        "estimate --config training_args.json --memory-limit 40GiB": "The recipe in a Trainer's arguments.",
    },
    "fit": {
        "fit --model llama3.2-1b --gpu rtx4090 --no-simulate": "The largest batch and sequence by the estimate alone.",
        "fit --model tiny --seq 512 --memory-limit 120MiB": "Each answer checked by simulated steps.",
        "fit --gpu rtx4090 -- trl sft --config sft.yaml": "The largest micro-batch of your own command.",
    },
    "advise": {
        "advise --model llama3.2-1b --batch 8 --gpu rtx4090 --no-simulate": "What to change for a 24 GB card.",
        "advise --config training_args.json --gpu rtx4090 --no-simulate": "The same as changed lines of your file.",
        "advise --gpu rtx4090 -- trl dpo --config dpo.yaml": "The cheapest changes of your own command.",
    },
    "compare": {
        "compare runs/001 runs/002": "Two runs, role by role.",
        "compare runs/001": "A run with its own estimate.",
        "compare snapshot.pickle estimate.json": "A recording with the output of `estimate --json`.",
    },
    "diff": {
        "diff before.pickle after.pickle": "What grew and what shrank.",
        "diff before.pickle after.pickle --max-growth 2%": "For CI: exit code 3 if the peak grew by more than 2 %.",
    },
    "sweep": {
        "sweep --model tiny --batch 1,2 --liger none,flce --dry-run": "The cells of a grid, with estimates.",
        "sweep --model tiny --batch 1,2 --liger none,flce -o runs/tiny": "Run them; the same command resumes.",
    },
    "study": {
        "study --dry-run": "The cells of the study of 2024.",
        "study --report -o runs/study": "The report of the cells that have finished.",
    },
    "plot": {
        "plot runs/sweep": "All figures that a sweep allows.",
        "plot snapshot.pickle --kind memory --format svg -o timeline": "The memory of a recording over time.",
    },
    "bench": {
        "bench flce rms": "The fused loss and RMSNorm of every provider, on a GPU.",
        "bench --from bench.jsonl --figure bench.svg": "Records of an earlier bench, without a GPU.",
    },
    "trace": {
        "trace step.pt.trace.json": "Busy time, gaps and kernels of a trace of torch.profiler.",
        "trace step.pt.trace.json later.pt.trace.json": "What changed between two traces.",
    },
    "view": {"view runs/001": "TensorBoard on a run, until Ctrl-C."},
    "models": {"models llama3.1": "The figures of every Llama 3.1.", "models --json": "All models, for scripts."},
    "kernels": {
        "kernels --model llama3.2-1b": "Which kernels apply to a model.",
        "kernels check rms": "Test a kernel against its reference.",
    },
    "mcp": {"mcp": "Serve the tools until the agent closes standard input."},
    "env": {"env": "What is installed, and which GPUs there are.", "env --json": "The same for scripts."},
}


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
                for words, text in examples.items():
                    formatter.write(f"  ligerprof {words}\n      {text}\n")
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
