"""Launchers of ranks, which go on as they are up to where they start processes: then the chosen ranks are started."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ligerprof.errors import LigerprofError, UnsupportedError
from ligerprof.runs.recording.imports import after_import_or_now
from ligerprof.runs.recording.messages import say
from ligerprof.simulated_gpu.ranks.world import run_ranks

_LAUNCH = "deepspeed.launcher.launch"


def replace_launchers() -> None:
    """Let torchrun, and what is built on it, and DeepSpeed's launcher start simulated ranks."""
    after_import_or_now("torch.distributed.launcher.api", _replace_elastic)
    after_import_or_now("deepspeed.launcher.runner", _replace_deepspeed)


def _replace_elastic(module: Any) -> None:
    def launch_agent(config: Any, entrypoint: Any, args: list[Any], **_others: Any) -> dict[int, Any]:
        if not isinstance(entrypoint, str):
            raise UnsupportedError("run: ranks that are functions are not simulated. Launch a script with torchrun.")

        def start(environment: dict[str, str]) -> "subprocess.Popen[bytes]":
            # the launcher marks where a rank's number goes into its arguments
            words = [str(word).replace("${local_rank}", environment["LOCAL_RANK"]) for word in args]
            return subprocess.Popen([entrypoint, *words], env=environment)

        _end(lambda: run_ranks(start, config.max_nodes * config.nproc_per_node, config.nproc_per_node))
        return {}

    module.launch_agent = launch_agent


def _replace_deepspeed(module: Any) -> None:
    """DeepSpeed's runner starts a launcher on each node; there is one here, and it is `deepspeed_launch`."""
    start = subprocess.Popen

    def popen(command: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(command, list) and _LAUNCH in command:
            place = command.index(_LAUNCH)
            command = [*command[: place - 1], "-m", __name__, *command[place + 1 :]]
        return start(command, *arguments, **named)

    module.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": popen})


def deepspeed_launch() -> None:
    """What deepspeed.launcher.launch does with its arguments, for the chosen ranks."""
    import deepspeed.launcher.launch as module  # type: ignore[import-not-found, import-untyped, unused-ignore]

    arguments = module.parse_args()
    world = module.json.loads(module.base64.urlsafe_b64decode(arguments.world_info))
    per_node = len(next(iter(world.values())))

    def start(environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        interpreter = [] if arguments.no_python else [sys.executable, "-u"]
        module_option = ["-m"] if arguments.module else []
        local = [] if arguments.no_local_rank else [f"--local_rank={environment['LOCAL_RANK']}"]
        rest = [arguments.training_script, *local, *arguments.training_script_args]
        return subprocess.Popen([*interpreter, *module_option, *rest], env=environment)

    _end(lambda: run_ranks(start, per_node * len(world), per_node))


def _end(run: Callable[[], int]) -> None:
    """End the launcher as its ranks ended."""
    try:
        code = run()
    except LigerprofError as error:
        say(str(error))
        code = error.exit_code
    if code:
        raise SystemExit(code if code > 0 else 128 - code)


if __name__ == "__main__":
    deepspeed_launch()
