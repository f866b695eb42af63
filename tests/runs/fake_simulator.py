"""A simulator for tests of its client, without torch: `python -m tests.runs.fake_simulator DESCRIPTOR`.

What a task does depends on the recipe's batch: 13 fails, 66 ends its process, 67 the server, others are answered.
"""

import os
import socket
import sys
from multiprocessing.connection import Connection
from unittest import mock

from ligerprof.errors import UnsupportedError
from ligerprof.roles import Backend, Phase
from ligerprof.runs.outcome import OutOfMemory, StepOutcome
from ligerprof.runs.simulated import server


def prepare(_task: str, recipe: dict[str, int], *_others: object) -> None:
    if recipe["batch"] == 67:
        os._exit(1)


def answer(own: Connection, _task: str, recipe: dict[str, int], *_others: object) -> None:
    batch = recipe["batch"]
    if batch != 66:
        own.send(("progress", "simulating"))
        own.send(("error", UnsupportedError("13")) if batch == 13 else ("outcome", outcome(batch)))
    os._exit(0)


def main() -> None:
    with mock.patch.multiple(server, _prepare=prepare, _answer=answer):
        server.serve(socket.socket(fileno=int(sys.argv[1])))


def outcome(batch: int) -> StepOutcome:
    """First step: the batch; steady step: the process; out of memory from 8 on."""
    full = OutOfMemory(
        requested_bytes=1, allocated_bytes=1, reserved_bytes=1, limit_bytes=1, phase=Phase.FORWARD, step=1
    )
    return StepOutcome(
        backend=Backend.SIMULATED,
        gpu="",
        peak_bytes=0,
        reserved_bytes=os.getpid(),
        first_step_peak_bytes=0,
        first_step_reserved_bytes=batch,
        phases={},
        after_phase={},
        profiled_step=2,
        snapshot={},
        oom=None if batch < 8 else full,
    )


if __name__ == "__main__":
    main()
