"""The world that a simulated rank is part of, and the processes of the ranks that run.

Every rank that is asked for runs the program in a process of its own. A rank that waits for a message of another one
writes down its number; then that one is started, too. So the ranks of a pipeline that lie between two others run
without anybody having to know the pipeline.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ligerprof.errors import LigerprofError, RecipeError

_SIZE, _RANKS, _FOLDER = "LIGERPROF_WORLD", "LIGERPROF_RANKS", "LIGERPROF_WORLD_FOLDER"
_GPUS_PER_NODE = 8
WANTED, NEIGHBOR = "wanted", "neighbor"
_POLL_SECONDS = 0.05
# of the ranks that nobody waits for, as many at a time as there are cores
_CORES = os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """What `--world` and `--ranks` say.

    Attributes:
        size: number of ranks; None: what the command's own launcher says.
        ranks: the ranks to run; empty: the first and the last.
        folder: where ranks leave messages for each other; None before the command runs.
    """

    size: int | None = None
    ranks: tuple[int, ...] = ()
    folder: Path | None = None

    def to_environment(self) -> dict[str, str]:
        size = {} if self.size is None else {_SIZE: str(self.size)}
        folder = {} if self.folder is None else {_FOLDER: str(self.folder)}
        return {_RANKS: ",".join(map(str, self.ranks)), **size, **folder}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "World":
        size, ranks, folder = (environment.get(name, "") for name in (_SIZE, _RANKS, _FOLDER))
        return cls(
            size=int(size) if size else None,
            ranks=tuple(int(rank) for rank in ranks.split(",") if rank),
            folder=Path(folder) if folder else None,
        )

    def chosen(self, size: int) -> tuple[int, ...]:
        """The ranks to run in a world of this size; raises RecipeError if the world lacks a chosen rank."""
        for rank in self.ranks:
            if rank >= size:
                raise RecipeError(f"--ranks {rank}: a world of {size} has the ranks 0 to {size - 1}.")
        return self.ranks or tuple(sorted({0, size - 1}))


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read `0,63` or `0-7,63`; raises RecipeError for anything else than ranks, counted from 0."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise RecipeError(f"{text!r}: not ranks. Give numbers from 0 on, such as 0,63 or 0-7.")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def rank_environment(rank: int, size: int, per_node: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment that torchrun gives a rank."""
    per_node = min(per_node, size)
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank % per_node,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": rank // per_node,
        "GROUP_WORLD_SIZE": -(-size // per_node),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "NODE_RANK": rank // per_node,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "simulated"}
    return {"OMP_NUM_THREADS": "1", **environment, **address, **{name: str(value) for name, value in own.items()}}


def gpu_of_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """The index of this process's GPU, and how many its node has."""
    count = int(environment.get("LOCAL_WORLD_SIZE") or 1)
    return int(environment.get("LOCAL_RANK") or 0) % count, count


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """The number of ranks that this process is one of."""
    return int(environment.get("WORLD_SIZE") or 1)


def run_ranks(
    start: Callable[[dict[str, str]], "subprocess.Popen[bytes]"],
    size: int,
    per_node: int = _GPUS_PER_NODE,
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Run the chosen ranks of a command, and those that they wait for.

    Args:
        start: starts the process of a rank with its environment.
        size: number of ranks of the world, unless `--world` says another.

    Returns:
        The first exit code that is not 0, or 0.

    Raises:
        RecipeError: a rank is asked for that the world does not have.
    """
    world = World.from_environment(environment)
    size = world.size or size
    waiting = list(world.chosen(size))
    seen = set(waiting)
    running: dict[int, subprocess.Popen[bytes]] = {}
    ended: dict[int, int] = {}
    try:
        while waiting or running:
            for rank in marked_ranks(world.folder, WANTED):
                if rank not in running and rank not in ended:
                    # others wait for it, so that it cannot wait for a core
                    running[rank] = start(rank_environment(rank, size, per_node, environment))
            neighbors = [rank for rank in marked_ranks(world.folder, NEIGHBOR) if rank not in seen]
            seen.update(neighbors)
            waiting = [rank for rank in waiting + neighbors if rank not in running and rank not in ended]
            while waiting and len(running) < max(_CORES, 2):
                rank = waiting.pop(0)
                running[rank] = start(rank_environment(rank, size, per_node, environment))
            for rank, process in list(running.items()):
                code = process.poll()
                if code is not None:
                    ended[rank] = code
                    del running[rank]
                    if world.folder is not None:
                        # the others wait for nothing more
                        (world.folder / f"ended-{rank}").touch()
            time.sleep(_POLL_SECONDS)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    return next((code for _, code in sorted(ended.items()) if code), 0)


def script_command(command: Sequence[str], size: int) -> list[str]:
    """The command that runs ranks of one that has no launcher of its own."""
    return [sys.executable, "-m", __name__, str(size), *command]


def mark_rank(folder: Path, rank: int, mark: str) -> None:
    """Ask for a rank to run: one that this rank waits for, or another stage of its pipeline."""
    (folder / f"{mark}-{rank}").touch()


def marked_ranks(folder: Path | None, mark: str) -> list[int]:
    """The ranks that others ask for."""
    return [] if folder is None else [int(path.name.partition("-")[2]) for path in folder.glob(f"{mark}-*")]


def has_ended(folder: Path, rank: int) -> bool:
    """Whether a rank's process has ended."""
    return (folder / f"ended-{rank}").exists()


def main() -> None:
    """Run ranks of the command after the size of the world."""
    size, *command = sys.argv[1:]
    try:
        code = run_ranks(lambda environment: subprocess.Popen(command, env=environment), int(size))
    except (OSError, LigerprofError) as error:
        raise SystemExit(f"ligerprof: {error}") from None
    raise SystemExit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
