"""`ligerprof view`: TensorBoard with the PyTorch profiler plugin on a run."""

import signal
import sys
from pathlib import Path

import click

from ligerprof.cli.command import DocumentedCommand
from ligerprof.cli.common_options import json_option
from ligerprof.cli.output import print_json, say
from ligerprof.serialization import document


@click.command(cls=DocumentedCommand, name="view")
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0: any free port. Default: 6006, or one of the next ports if it is taken.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@json_option
def command(run: Path, port: int | None, host: str, as_json: bool) -> None:
    """Serve a run with TensorBoard and the PyTorch profiler plugin until Ctrl-C.

    RUN is a directory that `ligerprof step` wrote, or a folder of them.
    """
    from ligerprof.runs.viewer import serve

    # a terminal that closes and SIGTERM stop the server like Ctrl-C
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda _signal, _frame: sys.exit(0))
    try:
        with serve(run, host=host, port=port) as serving:
            say(f"serving {run} at {serving.address} (Ctrl-C ends it)")
            page, profiler, _ = serving.address.partition("#")
            if profiler:
                say(
                    "The profiler's tab loads scripts from www.gstatic.com and cdnjs.cloudflare.com. Without them:"
                    f" {page}#scalars, and `ligerprof trace {run}` for the trace"
                )
            if as_json:
                print_json(document("view", {"run": str(run), "address": serving.address}))
            serving.wait()
    except KeyboardInterrupt:
        say("ended")
