"""A launcher that starts one process forks it instead: the program shares what the launcher has imported."""

import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ligerprof.runs.recording.imports import after_import_or_now
from ligerprof.runs.recording.progress import say
from ligerprof.simulated_gpu.device import Device

# variables that are read when a program runs, not when a package is imported
_READ_LATE = "ACCELERATE_"
_THREADS = "OMP_NUM_THREADS"
# what the program leaves lives until the process has ended
_left: list[dict[str, Any]] = []


def fork_from_launchers(device: Device) -> None:
    """Let `accelerate launch`, and what is built on it, fork the process of a program that has one."""
    after_import_or_now("accelerate.commands.launch", lambda module: _replace(module, device))


def _replace(module: Any, device: Device) -> None:
    original, prepare = (getattr(module, name, None) for name in ("simple_launcher", "prepare_simple_launcher_cmd_env"))
    if original is None or prepare is None:
        say("this version of accelerate starts the program in a Python of its own, which imports everything again")
        return

    def launch(arguments: Any) -> None:
        command, environment = prepare(arguments)
        if device.allocations or not _can_fork(command, environment):
            original(arguments)
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        process = os.fork()
        if not process:
            _become(command[1:], environment)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code and arguments.quiet:
            raise SystemExit(1)
        if code:
            raise subprocess.CalledProcessError(returncode=code, cmd=command)

    module.simple_launcher = launch


def _can_fork(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a new Python would start as a fork of this one goes on."""
    names = {name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)}
    return (
        command[0] == sys.executable
        and all(name.startswith(_READ_LATE) for name in names - {_THREADS})
        and threading.active_count() == 1
    )


def _become(words: list[str], environment: Mapping[str, str]) -> None:
    """Run a script, or `-m` and a module, as Python does with these arguments; ends this process."""
    os.environ.update(environment)
    if environment.get(_THREADS, "").isdecimal():
        torch.set_num_threads(int(environment[_THREADS]))
    # the recording begins again with CUDA, as whatever waits for it
    cuda: Any = torch.cuda
    cuda._initialized = False
    sys.orig_argv[1:] = words
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = str(Path.cwd())
        _left.append(runpy.run_module(words[1], run_name="__main__", alter_sys=True))
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        _left.append(runpy.run_path(words[0], run_name="__main__"))
    raise SystemExit
