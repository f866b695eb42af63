"""Run a program up to where it reads its arguments, once: each trial of a search goes on from there as a fork.

The trunk is the command as it is, which imports what it needs and stops where it first reads `sys.argv`. Each branch is
a fork of it with other arguments. The trunk runs no further, so nothing before the branches depends on the arguments.
Uses the standard library alone: the door loads it into a process of the command.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

VARIABLE = "LIGERPROF_BRANCHES"
# variables that branches may have other values of: read when memory is first taken, or by a recording when it begins
READ_LATE = ("LIGERPROF", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_MOST_BYTES = 2**20
_POLL_SECONDS = 0.02


def to_environment(descriptor: int, words: Sequence[str], *, is_launched: bool) -> dict[str, str]:
    """The variable that makes a process a trunk.

    Args:
        descriptor: an open socket, whose other end asks for branches.
        is_launched: whether the command is a launcher that forks the program which is to branch.
    """
    return {VARIABLE: json.dumps({"socket": descriptor, "words": list(words), "is_launched": is_launched})}


class _Trunk:
    """What this process is to do when it reads its arguments."""

    def __init__(
        self, channel: socket.socket, words: list[str], is_unused: Callable[[], bool], prepare: Callable[[], None]
    ) -> None:
        self._channel, self._words, self._prepare = channel, words, prepare
        self._is_unused = is_unused
        self._running: set[int] = set()

    def serve(self) -> None:
        """Fork branches until the other end is closed; returns in a branch alone."""
        # a fork has none of the other threads
        if threading.active_count() > 1 or not self._is_unused():
            os._exit(0)
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        self._send(kind="ready")
        while True:
            if select.select([self._channel], [], [], _POLL_SECONDS)[0] and self._forks():
                return
            for process in list(self._running):
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    self._running.remove(process)
                    self._send(kind="ended", process=process, exit_code=os.waitstatus_to_exitcode(status))

    def _forks(self) -> bool:
        text = self._channel.recv(_MOST_BYTES)
        if not text:
            self._end()
        request = json.loads(text)
        arguments = arguments_of(list.copy(sys.argv), self._words, request["words"])
        if arguments is None:
            self._send(kind="refused")
            return False
        process = os.fork()
        if not process:
            self._become(request, arguments)
            return True
        self._running.add(process)
        self._send(kind="begun", process=process)
        return False

    def _become(self, request: Mapping[str, Any], arguments: list[str]) -> None:
        self._channel.close()
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)
        for name, value in request["variables"].items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        sys.orig_argv[:] = request["words"]
        list.__init__(sys.argv, arguments)
        sys.argv = list(arguments)
        self._prepare()

    def _send(self, **message: Any) -> None:
        with suppress(OSError):
            self._channel.send(json.dumps(message).encode())

    def _end(self) -> NoReturn:
        for process in self._running:
            with suppress(OSError):
                os.killpg(process, signal.SIGKILL)
        os._exit(0)


def arguments_of(arguments: list[str], words: Sequence[str], changed: Sequence[str]) -> list[str] | None:
    """A program's arguments if its command had changed words; None if they do not end as the command does."""
    same = 0
    while same < min(len(words), len(changed)) and words[same] == changed[same]:
        same += 1
    rest = list(words[same:])
    kept = arguments[: len(arguments) - len(rest)]
    return [*kept, *changed[same:]] if kept and arguments[len(kept) :] == rest else None


class _Arguments(list[str]):
    """The list in `sys.argv` until the program reads an argument; reading its own path does not count."""


def _reading(name: str) -> Any:
    original = getattr(list, name)

    def method(self: _Arguments, *given: Any) -> Any:
        if _trunks and sys.argv is self and not (name == "__getitem__" and given == (0,)):
            _trunks.pop().serve()
        return original(self, *given)

    return method


_READS = ("__getitem__", "__iter__", "__len__", "__contains__", "__add__", "__eq__", "__reversed__")
for _name in (*_READS, "pop", "index", "copy", "count"):
    setattr(_Arguments, _name, _reading(_name))

_trunks: list[_Trunk] = []
_launched: list[_Trunk] = []


def become_trunk(is_unused: Callable[[], bool], prepare: Callable[[], None]) -> None:
    """Stop where this process reads its arguments, if its environment asks for branches.

    Args:
        is_unused: whether nothing has been allocated on the GPU.
        prepare: called in each branch, whose settings the environment has by then.
    """
    text = os.environ.pop(VARIABLE, "")
    if not text:
        return
    values = json.loads(text)
    with suppress(OSError):
        trunk = _Trunk(socket.socket(fileno=values["socket"]), values["words"], is_unused, prepare)
        (_launched if values["is_launched"] else _trunks).append(trunk)
        if not values["is_launched"]:
            sys.argv = _Arguments(sys.argv)


def in_launched_program() -> None:
    """The same in the program that a launcher has forked."""
    if _launched:
        _trunks.append(_launched.pop())
        sys.argv = _Arguments(sys.argv)


def is_trunk() -> bool:
    """Whether the program of this process has not read its arguments yet, and is to stop there."""
    return bool(_trunks)
