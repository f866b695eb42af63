"""`ligerprof kernels`: the fused kernels and where they can run; `kernels check` tests one."""

import os

import click

from ligerprof.cli.command import DocumentedGroup
from ligerprof.cli.common_options import complete_kernels, complete_models, complete_providers, json_option
from ligerprof.cli.output import show
from ligerprof.models import load_model


@click.group(cls=DocumentedGroup, name="kernels", invoke_without_command=True)
@click.option(
    "--model", metavar="NAME|PATH", help="Also show which kernels apply to this model.", shell_complete=complete_models
)
@json_option
@click.pass_context
def command(ctx: click.Context, model: str | None, as_json: bool) -> None:
    """List the fused kernels and where they can run.

    The list includes kernels of installed plug-ins, and broken plug-ins with the error. `ligerprof kernels check NAME`
    tests one kernel against its reference.
    """
    from ligerprof.kernels.registry import load_registry
    from ligerprof.reports.kernels import kernels_json, list_states, render_kernels

    if ctx.invoked_subcommand is not None:
        return
    listing = list_states(load_registry(), load_model(model) if model is not None else None)
    show(lambda: kernels_json(listing), lambda: render_kernels(listing), as_json=as_json)


@command.command()
@click.argument("name", metavar="NAME[:PROVIDER]", shell_complete=complete_kernels)
@click.option(
    "--provider",
    metavar="NAME",
    default="ligerprof",
    show_default=True,
    help="Whose kernel.",
    shell_complete=complete_providers,
)
@json_option
@click.pass_context
def check(ctx: click.Context, name: str, provider: str, as_json: bool) -> None:
    """Test a kernel, or an objective such as dpo, against its reference, on a GPU or in Triton's interpreter.

    Compares values and gradients with fp64, in several dtypes and layouts, compiles the kernel, and compares the bytes
    that it allocates with the declared ones. Exits with 1 if a row fails.
    """
    # Triton reads it when it is imported; on a machine with a GPU nothing is interpreted
    if not _has_gpu():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from ligerprof.reports.kernels import kernel_check_json, render_kernel_check
    from ligerprof.runs.kernel_check import check_kernel, find_checked

    kernel, _, own = name.partition(":")
    found = check_kernel(find_checked(kernel, own or provider))
    show(lambda: kernel_check_json(found), lambda: render_kernel_check(found), as_json=as_json)
    if not found.passed:
        ctx.exit(1)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
