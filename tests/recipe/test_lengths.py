"""Files of lengths, and the batches that samplers and collators make of them."""

import dataclasses
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ligerprof.errors import RecipeError
from ligerprof.recipe.lengths import BatchShape, at_longest, read_lengths, run_shapes
from ligerprof.recipe.training import TrainingRecipe

LENGTHS = [100, 40, 100, 7, 300, 64, 64]


def recipe_for(folder: Path, lengths: list[int], **options: Any) -> TrainingRecipe:
    path = folder / "lengths.txt"
    path.write_text("\n".join(map(str, lengths)), encoding="utf-8")
    return TrainingRecipe(model="tiny", lengths=str(path), **{"batch": 2, "seq": 256, **options})


def shapes_of(recipe: TrainingRecipe) -> list[BatchShape]:
    return [shape for step in run_shapes(recipe).steps for shape in step]


def test_batches_in_the_order_of_the_file(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, LENGTHS, length_order="file")
    assert shapes_of(recipe) == [
        BatchShape(rows=2, tokens=100, masked=True),
        BatchShape(rows=2, tokens=100, masked=True),
        BatchShape(rows=2, tokens=256, masked=True),
        BatchShape(rows=1, tokens=64),
    ]
    run = run_shapes(recipe)
    assert (run.sequences, run.cut) == (7, 1)
    assert (run.tokens, run.batch_tokens) == (sum(LENGTHS) - 44, 200 + 200 + 512 + 64)
    rounded = dataclasses.replace(recipe, pad_to_multiple_of=64)
    assert [shape.tokens for shape in shapes_of(rounded)] == [128, 128, 256, 64]


def test_sequences_of_one_length_need_no_mask(tmp_path: Path) -> None:
    assert set(shapes_of(recipe_for(tmp_path, [64] * 4))) == {BatchShape(rows=2, tokens=64)}


def test_accumulated_micro_batches_are_one_step(tmp_path: Path) -> None:
    run = run_shapes(recipe_for(tmp_path, [10] * 10, grad_accum=2))
    assert [len(step) for step in run.steps] == [2, 2, 1]


@pytest.mark.parametrize("order", ["random", "grouped"])
def test_every_sequence_is_taken_once(order: str, tmp_path: Path) -> None:
    lengths = list(range(1, 200))
    # rows of one sequence show which were taken
    shapes = shapes_of(recipe_for(tmp_path, lengths, batch=1, length_order=order))
    assert Counter(shape.tokens for shape in shapes) == Counter(lengths)
    assert [shape.tokens for shape in shapes] != lengths
    assert order == "random" or shapes[0].tokens == 199


def test_grouping_pads_less(tmp_path: Path) -> None:
    lengths = [Random(number).randint(1, 256) for number in range(400)]
    grouped, random = (
        run_shapes(recipe_for(tmp_path, lengths, length_order=order)).batch_tokens for order in ("grouped", "random")
    )
    assert sum(lengths) <= grouped < random


def slow_best_fit(lengths: list[int], capacity: int) -> list[int]:
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [index for index, held in enumerate(rows) if held + length <= capacity]
        if fitting:
            rows[max(fitting, key=lambda index: rows[index])] += length
        else:
            rows.append(length)
    return rows


@pytest.mark.parametrize("number", range(5))
def test_packing_is_best_fit_decreasing(number: int, tmp_path: Path) -> None:
    random = Random(number)
    lengths = [random.randint(1, 60) for _ in range(100)]
    packed = recipe_for(tmp_path, lengths, batch=1, seq=64, packing=True)
    rows = [shape.tokens for shape in shapes_of(packed)]
    assert sorted(rows) == sorted(slow_best_fit(lengths, 64))
    assert all(shape.rows == 1 for shape in shapes_of(dataclasses.replace(packed, batch=3)))


def test_sequential_packing_cuts_at_the_end_of_a_row(tmp_path: Path) -> None:
    packed = recipe_for(tmp_path, [40, 40, 30], batch=1, seq=64, packing=True, packing_strategy="sequential")
    assert sorted(shape.tokens for shape in shapes_of(packed)) == [46, 64]


def test_the_largest_micro_batch_stands_for_the_run_in_an_estimate(tmp_path: Path) -> None:
    longest = at_longest(recipe_for(tmp_path, LENGTHS, length_order="file"))
    assert (longest.batch, longest.seq, longest.lengths) == (2, 256, None)
    assert longest.padding > 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no length"),
        (b"\n \n", "no length"),
        (b"12\nabc\n", "line 2 is 'abc', not a whole number"),
        (b"12\n-3\n", "line 2 is '-3'"),
        (b"0\n", "line 1 is '0'"),
        (b"1.5\n", "line 1 is '1.5'"),
        (b"1" * 5000, "line 1 is "),
        (b"99999999999\n", "line 1 is '99999999999'"),
        ("\u0663\n".encode(), "line 1 is "),
        (b"\x1b[31m7\n", "line 1 is "),
        (b"\xff\xfe", "not UTF-8"),
        (b"1\n" * (2**20 + 1), "more than 1048576"),
        (b"1\n" * 2**24, "larger than"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_file_is_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        read_lengths(path)
    assert says in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such file"):
        read_lengths(tmp_path / "none.txt")


def test_padding_follows_from_the_lengths(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--padding .* does not go with --lengths, from which it follows"):
        recipe_for(tmp_path, LENGTHS, padding=0.2)
