"""Launchers of ranks, which go on as they are up to where they start processes: then the chosen ranks are started."""

import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from ligerprof.errors import LigerprofError, UnsupportedError
from ligerprof.runs.recording.imports import after_import_or_now
from ligerprof.runs.recording.settings import say
from ligerprof.simulated_gpu.ranks.world import gpu_of_rank, run_ranks

_LAUNCH = "deepspeed.launcher.launch"


def replace_launchers() -> None:
    """Let torchrun, and what is built on it, and DeepSpeed's launcher start simulated ranks."""
    after_import_or_now("torch.distributed.launcher.api", _replace_elastic)
    after_import_or_now("deepspeed.launcher", _replace_deepspeed)
    after_import_or_now("deepspeed.launcher.runner", _replace_runner)
    after_import_or_now("torch.multiprocessing.spawn", _replace_spawn)


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


class _OneRank:
    """A function that a program spawns for every rank of its node, called for one of them."""

    def __init__(self, function: Callable[..., Any], rank: int) -> None:
        self._function, self._rank = function, rank

    def __call__(self, _index: int, *arguments: Any) -> Any:
        return self._function(self._rank, *arguments)


def _replace_spawn(module: Any) -> None:
    """Each rank of the command is a process that runs the program; of the functions that it spawns, it runs its own."""
    start = module.start_processes

    def start_processes(fn: Callable[..., Any], args: Any = (), nprocs: int = 1, *others: Any, **named: Any) -> Any:
        rank, count = gpu_of_rank()
        if nprocs == count > 1 and multiprocessing.parent_process() is None:
            return start(_OneRank(fn, rank), args, 1, *others, **named)
        return start(fn, args, nprocs, *others, **named)

    module.start_processes = start_processes


def _replace_runner(module: Any) -> None:
    """DeepSpeed's runner starts the launcher of the first node, and connects to no other one of its host file."""
    parse = module.parse_args

    def parse_args(*arguments: Any, **named: Any) -> Any:
        options = parse(*arguments, **named)
        options.no_ssh, options.node_rank = True, 0
        options.master_addr = options.master_addr or "127.0.0.1"
        return options

    module.parse_args = parse_args


def _replace_deepspeed(_package: Any) -> None:
    """The launcher of a node starts the ranks of all nodes."""
    words = sys.orig_argv
    if "-m" in words and words[words.index("-m") + 1] == _LAUNCH:
        _deepspeed_launch()
        raise SystemExit


def _deepspeed_launch() -> None:
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

    _end(lambda: run_ranks(start, sum(map(len, world.values())), per_node))


def _end(run: Callable[[], int]) -> None:
    """End the launcher as its ranks ended."""
    try:
        code = run()
    except LigerprofError as error:
        say(str(error))
        code = error.exit_code
    if code:
        raise SystemExit(code if code > 0 else 128 - code)
