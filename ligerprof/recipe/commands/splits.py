"""How a number of GPUs can be split: other values of the parallel degrees that a command names."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.recipe.commands.changes import Change, TrainingCommand

GPUS_PER_NODE = 8
_REPLICAS, _SHARDS, _EXPERT = "replicas", "shards", "expert"
# in the order in which frameworks cut the world; the name of a key without its section
_PARTS = {
    "tensor": r"tp|autotp_size|tensor(_model)?_parallel(_size|_degree)|tp(_size|_degree)",
    "context": r"cp|(context|ulysses|ulysses_sequence|sequence)_parallel(_size|_degree)|(cp|sp)(_size|_degree)",
    "pipeline": r"pp|pipeline(_model)?_parallel(_size|_degree)|pp(_size|_degree)",
    _EXPERT: r"expert(_model)?_parallel(_size|_degree)|ep(_size|_degree)",
    _REPLICAS: r"(dp|data_parallel)_replicate(_size|_degree)?",
    _SHARDS: r"(dp|data_parallel)_shard(_size|_degree)?",
}
_ACCELERATES = "parallelism_config_"
# these and the data's shards and replicas make up the world
_MODEL = ("tensor", "context", "pipeline")


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """One way to split the GPUs: sizes by part, or by a key that is not known, and ranks that see different data."""

    sizes: Mapping[str, Any]
    data: int
    change: Change

    @property
    def name(self) -> str:
        """The parts of more than one rank."""
        parts = [
            f"{part} {size}" for part, size in self.sizes.items() if part not in (_REPLICAS, _SHARDS) and size != 1
        ]
        replicas = self.sizes.get(_REPLICAS, 1)
        data = str(self.data) if replicas == 1 else f"{replicas} x {self.data // replicas}"
        return ", ".join([*parts, f"data {data}"])

    @property
    def model_ranks(self) -> int:
        """Ranks that train on the same data."""
        return prod(self.sizes.get(part, 1) for part in _MODEL)


def find_splits(command: TrainingCommand, world: int, varied: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Split]:
    """The splits of a world, the command's own first, then those with the fewest ranks for a model.

    Args:
        varied: keys with the values that they are to have; without any, the keys of the command have the divisors of
            the world up to a node's GPUs.

    Raises:
        RecipeError: the command has no key for a degree, or no split has the size of the world.
    """
    keys = {part: key for key in reversed(command.keys) if (part := _part_of(key)) and _size(command, key) is not None}
    keys |= {_part_of(key) or key: key for key, _ in varied}
    if not keys:
        raise RecipeError(
            f"{command.name}: no argument or key has a parallel degree, such as tensor_parallel_degree or"
            " pipeline_model_parallel_size. Name one with --vary, such as --vary tp_size=1,2,4."
        )
    chosen = {_part_of(key) or key: sizes for key, sizes in varied}
    for part, sizes in chosen.items():
        if part in _PARTS and not all(type(size) is int and size > 0 for size in sizes):
            raise RecipeError(f"--vary {keys[part]}: a number of ranks is a whole number above 0.")
    parts = [part for part in dict.fromkeys((*_PARTS, *keys)) if part in keys]
    own = {part: max(_size(command, key) or 1, 1) for part, key in keys.items()}
    values = [chosen.get(part) or _values(part, own[part], 1 if chosen else world) for part in parts]
    found = (dict(zip(parts, sizes, strict=True)) for sizes in product(*values))
    splits = [split for sizes in found if (split := _split(command, world, sizes, keys, chosen)) is not None]
    if not splits:
        raise RecipeError(f"--world {world}: no values of {', '.join(keys.values())} multiply to it or divide it.")
    return sorted(splits, key=lambda split: (split.change != Change(), split.model_ranks))


def _part_of(key: str) -> str | None:
    name = key.rpartition(".")[2].removeprefix(_ACCELERATES)
    return next((part for part, pattern in _PARTS.items() if re.fullmatch(pattern, name)), None)


def _size(command: TrainingCommand, key: str) -> int | None:
    value = command.value(key)
    return value if type(value) is int else None


def _values(part: str, own: int, world: int) -> Sequence[int]:
    """The sizes of a part. Shards are what others leave; they are replicated, if at all, from node to node."""
    if part in (_REPLICAS, _SHARDS):
        return sorted({own, world // GPUS_PER_NODE or own}) if part == _REPLICAS else (own,)
    return sorted({own, *(each for each in range(1, GPUS_PER_NODE + 1) if world % each == 0)})


def _split(
    command: TrainingCommand, world: int, sizes: dict[str, Any], keys: Mapping[str, str], varied: Collection[str]
) -> Split | None:
    """The split of these sizes; None if they do not divide the world."""
    data, rest = divmod(world, prod(sizes.get(part, 1) for part in _MODEL))
    shards, not_whole = divmod(data, sizes.get(_REPLICAS, 1))
    if rest or not_whole or (world // sizes.get("pipeline", 1)) % sizes.get(_EXPERT, 1):
        return None
    if _SHARDS in varied:
        if shards % sizes[_SHARDS]:
            return None
    elif _SHARDS in keys:
        # -1 leaves it to the program
        sizes[_SHARDS] = shards if (_size(command, keys[_SHARDS]) or 0) > 0 else command.value(keys[_SHARDS])
    changed = {keys[part]: size for part, size in sizes.items() if size != command.value(keys[part])}
    return Split(sizes=sizes, data=data, change=Change(keys=changed))
