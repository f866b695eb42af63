"""The process from which the trials of a command branch off: it has run up to where the command reads its arguments."""

import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path, PurePath
from typing import Any

from ligerprof.recipe.commands.shell import find_launch
from ligerprof.runs.recording import branches
from ligerprof.simulated_gpu.files import leaving_nothing

_MOST_BYTES = 2**20
_BEGIN_SECONDS = 300
# they fork the program with their one process
_LAUNCHERS = ("accelerate", "trl", "axolotl")


class Branch:
    """A branch, with the methods of a process that was started."""

    def __init__(self, trunk: "Trunk", process: int) -> None:
        self._trunk, self.pid = trunk, process

    def poll(self) -> int | None:
        return self._trunk.exit_code(self.pid)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            self._trunk.receive(1)
        return code


class Trunk:
    """Starts a command that stops where it reads its arguments.

    Args:
        environment: its variables; branches may have other settings of the recording and the allocator.
        folder: a run directory that it has for itself.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._words, self._environment = list(words), dict(environment)
        self._codes: dict[int, int] = {}
        self._answers: list[Mapping[str, Any]] = []
        self._ended = False
        self._stack = ExitStack()
        self._stack.enter_context(leaving_nothing(folder))
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptor = theirs.fileno()
        is_launched = PurePath(words[0]).name in _LAUNCHERS or list(words[1:3]) == ["-m", "accelerate.commands.launch"]
        asks = branches.to_environment(descriptor, words, is_launched=is_launched)
        try:
            self._process = subprocess.Popen(
                self._words,
                env={**environment, **asks},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                start_new_session=True,
            )
        except OSError:
            self.stop()
            raise
        finally:
            theirs.close()

    def branch(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> Branch | None:
        """Go on from there with other arguments; None if the program cannot; `log`: receives its output."""
        own = self._environment
        names = [name for name in {*environment, *own} if environment.get(name) != own.get(name)]
        if words[0] != self._words[0] or not all(name.startswith(branches.READ_LATE) for name in names):
            return None
        if self._answer("ready", keeps=True) is None:
            return None
        variables = {name: environment.get(name) for name in names}
        asked = {"words": list(words), "variables": variables, "log": str(log)}
        try:
            self._channel.send(json.dumps(asked).encode())
        except OSError:
            return None
        answer = self._answer("begun", "refused")
        return Branch(self, answer["process"]) if answer is not None and answer["kind"] == "begun" else None

    def exit_code(self, process: int) -> int | None:
        """The exit code of a branch, None if it runs."""
        self.receive(0)
        return self._codes.get(process, -signal.SIGKILL if self._ended else None)

    def receive(self, seconds: float) -> None:
        """Take in what the process says."""
        while not self._ended and select.select([self._channel], [], [], seconds)[0]:
            text = b""
            with suppress(OSError):
                text = self._channel.recv(_MOST_BYTES)
            message = json.loads(text) if text else {}
            if not message:
                self._ended = True
            elif message["kind"] == "ended":
                self._codes[message["process"]] = message["exit_code"]
            else:
                self._answers.append(message)
            seconds = 0

    def stop(self) -> None:
        """End it; its branches have ended."""
        self._channel.close()
        process = getattr(self, "_process", None)
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._stack.close()

    def _answer(self, *kinds: str, keeps: bool = False) -> Mapping[str, Any] | None:
        """What it answers, None if it has ended instead."""
        for _ in range(_BEGIN_SECONDS):
            found = next((each for each in self._answers if each["kind"] in kinds), None)
            if found is not None and not keeps:
                self._answers.remove(found)
            if found is not None or self._ended or self._process.poll() is not None:
                return found
            self.receive(1)
        return None


def can_branch(words: Sequence[str]) -> bool:
    """Whether a command runs a program in one process of Python, as far as its words say."""
    launch = find_launch(words, {}, lambda _: False)
    if launch is None or launch.launcher == "python":
        return True
    return launch.uses_accelerate and not launch.accelerate_file and launch.accelerate.get("num_processes", 1) == 1
