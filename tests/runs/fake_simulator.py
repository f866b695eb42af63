"""A simulator for tests of its client, without torch: `python -m tests.runs.fake_simulator DESCRIPTOR...`.

What it does depends on the recipe's batch: 13 fails, 66 ends the process, everything else is answered.
"""

import json
import os
import socket
import sys

from ligerprof.runs.simulators import read_line


def main() -> None:
    connections = [socket.socket(fileno=int(word)) for word in sys.argv[1:]]
    own = connections[0]
    for connection in connections[1:]:
        if os.fork() == 0:
            own = connection
            break
    for connection in connections:
        if connection is not own:
            connection.close()
    while (recipe := read_line(own)) is not None:
        batch = recipe["batch"]
        if batch == 66:
            os._exit(1)
        answer = {"first_bytes": batch, "steady_bytes": os.getpid(), "evaluation_bytes": 0, "fits": batch < 8}
        own.sendall(json.dumps({} if batch == 13 else answer).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
