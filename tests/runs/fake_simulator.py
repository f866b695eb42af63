"""A simulator for tests of its client, without torch: `python -m tests.runs.fake_simulator DESCRIPTOR...`.

What it does depends on the recipe's batch: 13 fails, 66 ends the process, everything else is answered.
"""

import os
import sys
from multiprocessing.connection import Connection

from ligerprof.errors import UnsupportedError
from ligerprof.roles import Backend, Phase
from ligerprof.runs.outcome import OutOfMemory, StepOutcome


def main() -> None:
    connections = [Connection(int(word)) for word in sys.argv[1:]]
    own = connections[0]
    for connection in connections[1:]:
        if os.fork() == 0:
            own = connection
            break
    for connection in connections:
        if connection is not own:
            connection.close()
    while True:
        try:
            _, recipe, *_ = own.recv()
        except EOFError:
            os._exit(0)
        batch = recipe["batch"]
        if batch == 66:
            os._exit(1)
        own.send(("progress", "simulating"))
        own.send(("error", UnsupportedError("13")) if batch == 13 else ("outcome", outcome(batch)))


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
