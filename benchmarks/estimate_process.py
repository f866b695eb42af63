"""Time `ligerprof estimate` as a process for every model of the catalog: user CPU time, with bytecode cached.

One line per model, then the median and the worst; last, the largest Llama with accumulation 8. User CPU time, not the
clock: what else the machine runs counts little.

Run from the repository root: python -m benchmarks.estimate_process [--every N]
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys

from ligerprof.models import CATALOG

_LARGEST = ("llama3.1-405b", "--grad-accum", "8")


def seconds(model: str, *options: str, tokens: int = 2048) -> float | None:
    """User CPU seconds of one estimate; None if it failed."""
    command = [sys.executable, "-m", "ligerprof", "estimate", "--model", model, "--batch", "1", "--seq", str(tokens)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    found = subprocess.run([*command, *options], env=environment, capture_output=True, check=False)
    if found.returncode not in (0, 3):
        return None
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="Only each N-th model.")
    names = [model.name for model in CATALOG][:: parser.parse_args().every]
    # the first one writes bytecode
    seconds(names[0], tokens=64)
    found: dict[str, float] = {}
    for name in names:
        taken = seconds(name) or seconds(name, tokens=1024) or seconds(name, tokens=512)
        if taken is None:
            print(f"{name:32} failed", flush=True)
            continue
        found[name] = taken
        print(f"{name:32} {taken:.2f} s", flush=True)
    worst = max(found, key=lambda name: found[name])
    print(
        f"\n{len(found)} models: median {statistics.median(found.values()):.2f} s, worst {found[worst]:.2f} s ({worst})"
    )
    print(f"{' '.join(_LARGEST)}: {seconds(*_LARGEST) or float('nan'):.2f} s")


if __name__ == "__main__":
    main()
