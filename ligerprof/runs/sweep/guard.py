"""Run one command that dies with its parent, however that dies: `python -m ligerprof.runs.sweep.guard COMMAND...`.

The parent holds the other end of stdin. When it closes, by will or by a kill that nobody could catch,
the whole process group ends: a training step that outlives its sweep would hold the GPU.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

# launchers of several ranks end their children on SIGTERM; SIGKILL would leave them
GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05


def main(command: list[str]) -> int:
    """Run the command to its end, or to the parent's.

    Returns:
        The command's exit code; 128 + N where signal N ended it, as a shell says it.
    """
    # a handler, as children would inherit that a signal is ignored
    signal.signal(signal.SIGTERM, lambda *_: None)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while (code := process.poll()) is None:
        parent_is_gone, _, _ = select.select([sys.stdin], [], [], _POLL_SECONDS)
        if parent_is_gone:
            _end_group(process)
    return code if code >= 0 else 128 - code


def _end_group(process: subprocess.Popen[bytes]) -> None:
    os.killpg(os.getpgrp(), signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    # and whoever did not listen, this process included
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
