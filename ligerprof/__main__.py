"""`python -m ligerprof` is `ligerprof`."""

import os
import sys


def run() -> None:
    """Run the command line; Ctrl-C ends it with 130 also while the first modules are imported."""
    try:
        from ligerprof.cli.main import main

        main(prog_name="ligerprof")
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        os._exit(130)


if __name__ == "__main__":
    run()
