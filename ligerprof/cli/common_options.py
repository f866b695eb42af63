"""Options shared by several commands, other than those of a recipe, and what a shell completes; importing is fast."""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ligerprof.errors import RecipeError
from ligerprof.text import short_repr
from ligerprof.units import parse_bytes
from ligerprof.words import Word, did_you_mean

simulate_option = click.option(
    "--simulate/--no-simulate",
    default=True,
    show_default=True,
    help="Check answers by simulated steps (seconds each), or use only the analytic estimate.",
)


Command = TypeVar("Command", bound=Callable[..., Any])
Value = TypeVar("Value")
WordT = TypeVar("WordT", bound=Word)

# an argument that `ligerprof.files.opened` reads: `-` is standard input
INPUT = click.Path(exists=True, allow_dash=True, path_type=Path)
# what a command writes
FILE, FOLDER = click.Path(path_type=Path, dir_okay=False), click.Path(path_type=Path, file_okay=False)


class WordChoice(click.Choice[str]):
    """One word of several; the error for another word suggests the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The word; raises BadParameter for another."""
        words = tuple(self.choices)
        if value not in words:
            meant = did_you_mean(str(value), words)
            raise click.BadParameter(f"{short_repr(value)} is unknown.{meant} Known: {', '.join(words)}.", ctx, param)
        return value


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
markdown_option = click.option(
    "--format",
    "as_markdown",
    type=WordChoice(("text", "markdown")),
    default="text",
    show_default=True,
    callback=lambda _ctx, _param, word: word == "markdown",
    help="Print text for a terminal, or Markdown for a pull request.",
)
force_option = click.option("--force", is_flag=True, help="Overwrite existing files.")
timeout_option = click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Time limit per cell."
)
dry_run_option = click.option("--dry-run", is_flag=True, help="Print cells and estimates without running the cells.")
top_option = click.option(
    "--top", type=click.IntRange(min=1), metavar="N", default=10, show_default=True, help="Rows to show."
)


def folder_option(text: str, default: Path | None = None) -> Callable[[Command], Command]:
    """The output directory; passes `output: Path`, or None without a default."""
    return click.option("-o", "--output", type=FOLDER, default=default, show_default=default is not None, help=text)


def size_option(flag: str, name: str, text: str) -> Callable[[Command], Command]:
    """An option for a size such as 24GiB; passes int bytes, or None."""

    def read(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
        return None if value is None else or_usage_error(parse_bytes, value)

    return click.option(flag, name, callback=read, metavar="SIZE", help=text)


def word_option(
    flag: str, words: Iterable[WordT], text: str, default: WordT | None = None
) -> Callable[[Command], Command]:
    """An option for one word of a category; passes the member, or None without a default."""
    members = {str(word): word for word in words}

    def read(_ctx: click.Context, _param: click.Parameter, value: str | None) -> WordT | None:
        return None if value is None else members[value]

    choice, word = WordChoice(tuple(members)), None if default is None else str(default)
    return click.option(flag, type=choice, callback=read, default=word, show_default=word is not None, help=text)


def trace_option(*, default: bool) -> Callable[[Command], Command]:
    """Whether to profile a measured step for TensorBoard; passes `trace: bool`."""
    text = "Profile two more steps on a GPU for TensorBoard."
    return click.option("--trace/--no-trace", default=default, show_default=True, help=text)


def or_usage_error(parse: Callable[[str], Value], text: str) -> Value:
    """Parse an option's value; a value that the parser refuses is a usage error."""
    try:
        return parse(text)
    except RecipeError as error:
        raise click.BadParameter(str(error)) from None


Names = Callable[[], Iterable[str]]
Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _models() -> Iterable[str]:
    from ligerprof.models.names import cached_ids, hub_names, short_names

    ids = dict.fromkeys(hub_id for hub_id, _ in hub_names().values())
    return (*short_names(), *ids, *cached_ids())


def _kernels() -> Iterable[str]:
    from ligerprof.kernels.registry import load_registry

    return dict.fromkeys(kernel.name for kernel in load_registry().kernels)


def _providers() -> Iterable[str]:
    from ligerprof.kernels.registry import load_registry

    return load_registry().providers


def _of(module: str, name: str) -> Names:
    """The names in a mapping or tuple of a module, which is imported when they are asked for."""
    return lambda: getattr(import_module(f"ligerprof.{module}"), name)


def _completer(names: Names, separators: str = "", *, alone: Sequence[str] = ()) -> Completer:
    """A completer of names, of the last of several between separators, or of those that stand alone; else of files."""

    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        start = max((incomplete.rfind(each) for each in separators), default=-1) + 1
        before, last = incomplete[:start], incomplete[start:].casefold()
        known = names() if before else (*alone, *names())
        found = [CompletionItem(before + name) for name in known if name.casefold().startswith(last)]
        return found or [CompletionItem(incomplete, type="file")]

    return complete


complete_models = _completer(_models, ",")
complete_gpus = _completer(_of("gpus", "GPUS"), ",")
complete_kernel_sets = _completer(_of("kernels.selection", "KERNEL_NAMES"), "+,", alone=("none", "all", "no-flce"))
complete_kernels = _completer(_kernels)
complete_benched = _completer(_of("runs.bench.records", "BENCH_KERNELS"), alone=("all",))
complete_providers = _completer(_providers, ",")

# by the name of an option of a recipe
OF_OPTIONS = {
    "model": complete_models,
    "gpu": complete_gpus,
    "liger": complete_kernel_sets,
    "provider": complete_providers,
}
