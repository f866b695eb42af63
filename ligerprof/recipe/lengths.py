"""The lengths of a data set: the file that lists them, and the batches that a sampler and a collator make of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.files import FileKind, read_text
from ligerprof.recipe.categories import Engine, LengthOrder, PackingStrategy
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.text import short_repr

_FILE = FileKind(error=RecipeError, hint="--lengths names a text file with one number per line.", max_bytes=2**24)
_MOST_LENGTHS, _LONGEST = 2**20, 2**31 - 1
_MOST_DIGITS = 10
# TrainingArguments.seed
_SEED = 42
# get_length_grouped_indices in transformers' trainer_pt_utils.py
_MOST_BATCHES_SORTED, _SORTED_PARTS = 50, 4


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class BatchShape:
    """The shape of a micro-batch: rows, 1 if packed, of so many tokens; `masked` if a mask hides padding."""

    rows: int
    tokens: int
    masked: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RunShapes:
    """The micro-batches of one pass over the data.

    Attributes:
        steps: the shapes of each step's micro-batches.
        cut: lengths above --seq, which are cut to it.
        tokens: of all sequences, once cut.
        batch_tokens: of all micro-batches, padding included.
    """

    steps: tuple[tuple[BatchShape, ...], ...]
    sequences: int
    cut: int
    tokens: int
    batch_tokens: int

    @property
    def longest(self) -> BatchShape:
        """The micro-batch with most tokens; of several, the one with the longest rows."""
        shapes = (shape for step in self.steps for shape in step)
        return max(shapes, key=lambda shape: (shape.rows * shape.tokens, shape.tokens, shape.masked))


def read_lengths(path: Path) -> tuple[int, ...]:
    """Read a file of lengths, one per line or blank; raises RecipeError for other lines, no length, or too many."""
    lengths = []
    for number, line in enumerate(read_text(path, _FILE).split("\n"), 1):
        text = line.strip()
        if not text:
            continue
        value = int(text) if len(text) <= _MOST_DIGITS and text.isascii() and text.isdigit() else 0
        if not 0 < value <= _LONGEST:
            raise RecipeError(
                f"{path}: line {number} is {short_repr(text)}, not a whole number from 1 to {_LONGEST}. {_FILE.hint}"
            )
        lengths.append(value)
    if not lengths:
        raise RecipeError(f"{path}: no length. {_FILE.hint}")
    if len(lengths) > _MOST_LENGTHS:
        raise RecipeError(f"{path}: {len(lengths)} lengths, more than {_MOST_LENGTHS}. Give a sample of them.")
    return tuple(lengths)


def require_simulated_run(recipe: TrainingRecipe) -> None:
    """Raise UnsupportedError if a pass over the recipe's file of lengths cannot be simulated."""
    if recipe.engine is not Engine.TORCH:
        raise UnsupportedError(f"--lengths: a whole run under {recipe.engine} cannot be simulated. Use --engine torch.")
    if recipe.activation_offload:
        raise UnsupportedError("--lengths: a whole run with --activation-offload cannot be simulated. Take one out.")


def recipe_of(recipe: TrainingRecipe, shape: BatchShape) -> TrainingRecipe:
    """The recipe of steps on one micro-batch of a shape."""
    # how many tokens are padded does not matter, only that a mask is passed
    padding = 0.5 if shape.masked else 0.0
    return replace(recipe, batch=shape.rows, seq=shape.tokens, padding=padding, lengths=None)


def at_longest(recipe: TrainingRecipe) -> TrainingRecipe:
    """The recipe of steps on the largest micro-batch of its file of lengths; the recipe itself without a file."""
    return recipe if recipe.lengths is None else recipe_of(recipe, run_shapes(recipe).longest)


def most_rows(recipe: TrainingRecipe) -> int:
    """The largest micro-batch of the recipe's file of lengths: all its sequences, or all rows of packed ones."""
    return sum(map(len, run_shapes(replace(recipe, batch=1)).steps))


def run_shapes(recipe: TrainingRecipe) -> RunShapes:
    """One pass over the recipe's file of lengths; raises RecipeError if there is none, or it cannot be read."""
    if recipe.lengths is None:
        raise RecipeError("no file of lengths. Give one with --lengths.")
    read = read_lengths(Path(recipe.lengths))
    lengths = [min(length, recipe.seq) for length in read]
    rows = _packed(lengths, recipe) if recipe.packing else lengths
    order = _order(rows, recipe)
    shapes = [
        _shape([rows[index] for index in order[start : start + recipe.batch]], recipe)
        for start in range(0, len(order), recipe.batch)
    ]
    count = recipe.grad_accum
    return RunShapes(
        steps=tuple(tuple(shapes[start : start + count]) for start in range(0, len(shapes), count)),
        sequences=len(lengths),
        cut=sum(length > recipe.seq for length in read),
        tokens=sum(lengths),
        batch_tokens=sum(shape.rows * shape.tokens for shape in shapes),
    )


def _shape(rows: Sequence[int], recipe: TrainingRecipe) -> BatchShape:
    """The batch that a collator makes: rows joined, or padded to the longest and to the multiple."""
    if recipe.packing:
        return BatchShape(rows=1, tokens=sum(rows))
    multiple = recipe.pad_to_multiple_of
    tokens = -(-max(rows) // multiple) * multiple
    return BatchShape(rows=len(rows), tokens=tokens, masked=min(rows) < tokens)


def _order(rows: Sequence[int], recipe: TrainingRecipe) -> list[int]:
    indices = list(range(len(rows)))
    if recipe.length_order is LengthOrder.FILE:
        return indices
    from random import Random

    # an order of training data, not a secret
    Random(_SEED).shuffle(indices)  # noqa: S311
    if recipe.length_order is LengthOrder.RANDOM:
        return indices
    count = max(min(len(rows) // (recipe.batch * _SORTED_PARTS), _MOST_BATCHES_SORTED), 1) * recipe.batch
    parts = [
        sorted(indices[start : start + count], key=lambda index: rows[index], reverse=True)
        for start in range(0, len(indices), count)
    ]
    longest = max(parts, key=lambda part: rows[part[0]])
    parts[0][0], longest[0] = longest[0], parts[0][0]
    return [index for part in parts for index in part]


def _packed(lengths: Sequence[int], recipe: TrainingRecipe) -> list[int]:
    if recipe.packing_strategy is PackingStrategy.SEQUENTIAL:
        whole, rest = divmod(sum(lengths), recipe.seq)
        return [recipe.seq] * whole + [rest] * (rest > 0)
    return list(_best_fit_decreasing(lengths, recipe.seq))


def _best_fit_decreasing(lengths: Sequence[int], capacity: int) -> Iterator[int]:
    """Put each sequence, longest first, into the fullest row with room for it (TRL's `bfd`)."""
    counts = [0] * (capacity + 1)
    # bit r is set if a row has room for r more tokens
    rooms = 0
    for length in sorted(lengths, reverse=True):
        fitting = rooms >> length
        room = capacity if fitting == 0 else length + (fitting & -fitting).bit_length() - 1
        if fitting:
            counts[room] -= 1
            if counts[room] == 0:
                rooms ^= 1 << room
        counts[room - length] += 1
        rooms |= 1 << (room - length)
    for room, count in enumerate(counts):
        yield from [capacity - room] * count
