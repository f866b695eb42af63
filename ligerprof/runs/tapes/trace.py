"""Trace the tape of a recipe's model."""

import dataclasses
from collections.abc import Iterator
from contextlib import suppress

from ligerprof.analyzers.estimate.hooks import Hooks
from ligerprof.analyzers.estimate.meter import Meter
from ligerprof.analyzers.estimate.static import make_weights
from ligerprof.analyzers.estimate.traced_batch import TracedMicroBatch
from ligerprof.errors import UnsupportedError
from ligerprof.models.tape import Tape, largest_multiple
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.roles import Role
from ligerprof.runs.outcome import Progress
from ligerprof.runs.tapes.build import Folder, Size, polynomials
from ligerprof.runs.tapes.own import OwnModule
from ligerprof.runs.tapes.recipes import Way, with_tape_of
from ligerprof.runs.tapes.record import Passes, Recording, UnlikePassesError, passes_of
from ligerprof.torch_memory.allocator.settings import SizeRules

_TOLERANCE = 0.001
# a polynomial of tokens has three coefficients
_LENGTHS = 3


def trace_here(recipe: TrainingRecipe, _progress: Progress, *, way: Way, own: OwnModule | None = None) -> Tape:
    """`traced.trace_tape` in this process, which has not simulated before and ends afterwards.

    Raises:
        UnsupportedError: the passes do not allocate in one order even at one size.
        LigerprofError: as `simulate_step` does.
    """
    with passes_of(recipe, way, own) as passes:
        try:
            return _traced(passes, recipe)
        except UnlikePassesError as error:
            raise UnsupportedError(
                f"estimate: {recipe.spec.name} cannot be traced: {error}. Use `ligerprof step --device simulated`."
            ) from None


def _traced(passes: Passes, recipe: TrainingRecipe) -> Tape:
    batch, seq = recipe.rows, recipe.row_tokens
    roles, recording = passes.roles(batch, seq), passes.record(batch, seq)
    if len(roles) != len(recording.sizes):
        raise UnlikePassesError(f"a traced pass has {len(recording.sizes)} blocks, and a recorded one {len(roles)}")
    own = (batch, seq)
    tape = _tape(passes, recipe, recording, roles, [own])
    _check(tape, passes, recipe)
    for sizes in _grids(recipe, passes.max_positions or recipe.spec.max_positions):
        with suppress(UnlikePassesError):
            return _tape(passes, recipe, recording, roles, [*sizes, own])
    return tape


def _check(tape: Tape, passes: Passes, recipe: TrainingRecipe) -> None:
    """Raise UnlikePassesError if the replay's peak is not that of the model's own passes."""
    # where adapters are trained, checkpointing changes what has a gradient
    as_traced = tape.flat or recipe.lora is not None or recipe.qlora is not None
    for checkpointing in (recipe.checkpointing,) if as_traced else (False, True):
        replayed = with_tape_of(dataclasses.replace(recipe, checkpointing=checkpointing), tape)
        meter = Meter(SizeRules())
        passed = TracedMicroBatch(replayed, make_weights(replayed), meter, Hooks())
        passed.forward()
        passed.backward()
        expected_bytes = passes.peak_bytes(recipe.rows, recipe.row_tokens, checkpointing=checkpointing)
        off = meter.peak_bytes / expected_bytes - 1
        if abs(off) > _TOLERANCE:
            how = "with" if checkpointing else "without"
            raise UnlikePassesError(f"the replay {how} checkpointing is {100 * off:+.2f} % from the passes")


def _grids(recipe: TrainingRecipe, max_positions: int) -> Iterator[list[Size]]:
    """Other sizes to trace, wider ranges first."""
    batch, seq = recipe.rows, recipe.row_tokens
    batches = (1,) if batch == 1 else (2, max(4 * batch, 5))
    for factor in (4, 2):
        seqs = _alike(seq, seq // factor, factor * seq, max_positions)
        if len(seqs) >= _LENGTHS:
            chosen = (seqs[0], seqs[len(seqs) // 2], seqs[-1])
            yield [(each, other) for each in batches for other in chosen]
    if batch > 1:
        yield [(each, seq) for each in sorted({2, 3, batches[-1]} - {batch})]


def _alike(seq: int, lowest: int, highest: int, max_positions: int) -> list[int]:
    """Other numbers of tokens in a range with the largest multiple of `seq`, without those that the model has not."""
    multiple = largest_multiple(seq)
    if seq <= max_positions:
        highest = min(highest, max_positions)
    around = range(max(lowest // multiple, 1) * multiple, highest + 1, multiple)
    return [tokens for tokens in around if tokens != seq and largest_multiple(tokens) == multiple]


def _tape(passes: Passes, recipe: TrainingRecipe, recording: Recording, roles: list[Role], sizes: list[Size]) -> Tape:
    traced: dict[Size, list[int]] = {}
    for size in sizes[:-1]:
        traced[size], order = passes.sizes(*size)
        if order != recording.order:
            raise UnlikePassesError(f"blocks begin and end in another order at {size[0]} x {size[1]} tokens")
    traced[sizes[-1]] = recording.numbers
    found, numbers, bounded_bytes = polynomials(traced, len(recording.sizes))
    folder = Folder(recording, numbers, roles, passes.paths)
    lt = recording.workspaces.get("cublaslt forward", 0) if recording.adds_bias else 0
    return Tape(
        polynomials=tuple(found),
        scratches=folder.scratches,
        units=folder.units,
        order=tuple(folder.order),
        layers=tuple(folder.paths or passes.paths),
        numbers=tuple(folder.called),
        parameters=passes.parameters,
        built=passes.built,
        buffers=passes.buffers,
        attention=tuple(sorted(passes.attention)),
        workspaces={
            "forward": sum(size for name, size in recording.workspaces.items() if name.endswith(" forward")),
            "backward": sum(size for name, size in recording.workspaces.items() if name.endswith(" backward")),
            "recomputed": lt,
        },
        batch=(min(size[0] for size in sizes), max(size[0] for size in sizes)),
        seq=(min(size[1] for size in sizes), max(size[1] for size in sizes)),
        multiple=largest_multiple(sizes[-1][1]),
        bounded_bytes=bounded_bytes,
        offloaded=numbers[-1] if recipe.activation_offload else None,
    )
