"""What a shell completes: the names of models, GPUs, kernels and providers, by option or argument."""

from collections.abc import Callable, Iterable, Sequence

import click
from click.shell_completion import CompletionItem

Names = Callable[[], Iterable[str]]
Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _models() -> Iterable[str]:
    from ligerprof.models.names import cached_ids, hub_names, short_names

    ids = dict.fromkeys(hub_id for hub_id, _ in hub_names().values())
    return (*short_names(), *ids, *cached_ids())


def _gpus() -> Iterable[str]:
    from ligerprof.gpus import GPUS

    return GPUS


def _slots() -> Iterable[str]:
    from ligerprof.kernels.selection import KERNEL_NAMES

    return KERNEL_NAMES


def _kernels() -> Iterable[str]:
    from ligerprof.kernels.registry import load_registry

    return dict.fromkeys(kernel.name for kernel in load_registry().kernels)


def _benched() -> Iterable[str]:
    from ligerprof.runs.bench.records import BENCH_KERNELS

    return (*BENCH_KERNELS, "all")


def _providers() -> Iterable[str]:
    from ligerprof.kernels.registry import load_registry

    return load_registry().providers


def _completer(names: Names, separators: str = "", *, alone: Sequence[str] = ()) -> Completer:
    """A completer of names, in upper or lower case, or of the last of several names; else of files.

    Args:
        separators: characters between names.
        alone: names that cannot be joined with others.
    """

    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        start = max((incomplete.rfind(each) for each in separators), default=-1) + 1
        before, last = incomplete[:start], incomplete[start:].casefold()
        known = names() if before else (*alone, *names())
        found = [CompletionItem(before + name) for name in known if name.casefold().startswith(last)]
        return found or [CompletionItem(incomplete, type="file")]

    return complete


complete_models = _completer(_models, ",")
complete_gpus = _completer(_gpus, ",")
complete_kernel_sets = _completer(_slots, "+,", alone=("none", "all", "no-flce"))
complete_kernels = _completer(_kernels)
complete_benched = _completer(_benched)
complete_providers = _completer(_providers, ",")

# by the name of an option of a recipe
OF_OPTIONS = {
    "model": complete_models,
    "gpu": complete_gpus,
    "liger": complete_kernel_sets,
    "provider": complete_providers,
}
