"""Ranks on the CPU for tests: forks of the test's process, which has imported torch already."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ligerprof.runs.measured.ranks import free_port, local_environment

_SECONDS = 120


def forked(work: Callable[[int], Any], count: int = 2) -> list[Any]:
    """The values that `work(rank)` returns on each rank of a group; fails with the traceback of a rank that failed."""
    context = multiprocessing.get_context("fork")
    port, pipes, processes = free_port(), [], []
    for rank in range(count):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_be_rank, args=(work, rank, count, port, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        found = [pipe.recv() if pipe.poll(_SECONDS) else (False, "no answer") for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    failed = [value for succeeded, value in found if not succeeded]
    assert not failed, failed[0]
    return [value for _, value in found]


def _be_rank(work: Callable[[int], Any], rank: int, count: int, port: int, answer: Connection) -> None:
    os.environ.update(local_environment(rank, count, port))
    try:
        message = (True, work(rank))
    except BaseException:
        message = (False, traceback.format_exc())
    answer.send(message)
    # without the exit handlers of the test's process
    os._exit(0)
