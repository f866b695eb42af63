"""Run a command that ends when its parent does: `python -m ligerprof.runs.sweep.guard COMMAND...`.

The parent holds the other end of stdin. When that is closed, on purpose or because the parent was killed, the
whole process group is ended: a training step that outlives its sweep would hold the GPU.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

# launchers of several ranks end their children on SIGTERM; SIGKILL would leave them running
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.05


def main(command: list[str]) -> int:
    """Run the command, or end the process group when stdin is closed; returns the exit code, 128 + N for signal N."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    # a handler rather than SIG_IGN, which children would inherit
    signal.signal(signal.SIGTERM, lambda *_: None)
    while (code := process.poll()) is None:
        parent_is_gone, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
        if parent_is_gone:
            os.killpg(os.getpgrp(), signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            # processes that ignored SIGTERM, and this one
            os.killpg(os.getpgrp(), signal.SIGKILL)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
