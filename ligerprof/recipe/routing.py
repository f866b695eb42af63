"""How tokens choose the experts of a mixture: evenly, all the same ones, or in given shares."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.files import FileKind, is_file, read_listed
from ligerprof.text import short_repr

UNIFORM, WORST = "uniform", "worst"
_HINT = "--routing takes uniform, worst, or a file with the tokens of each expert: a line for all layers, or one each."
_FILE = FileKind(error=RecipeError, hint=_HINT, max_bytes=2**20)
_BETWEEN_NUMBERS, _BETWEEN_LINES = ",", ";"
_MOST_TOKENS = 2**48


def canonical_routing(value: Any) -> str:
    """A routing as a recipe stores it: a word, or lines of numbers joined by `;`; raises RecipeError for anything else.

    A file has a line for all layers with experts, or one for each: the tokens that each expert receives, separated by
    blanks or commas; `#` starts a comment. Only their proportions count.
    """
    text = str(value)
    if text in (UNIFORM, WORST):
        return text
    if is_file(text):
        lines, where = read_listed(Path(text), _FILE), f"{text}: "
    else:
        lines, where = text.split(_BETWEEN_LINES), ""
    if not lines:
        raise RecipeError(f"{where}names no number of tokens. {_HINT}")
    try:
        rows = [[_tokens(word) for word in re.split(r"[\s,]+", line.strip(" ,"))] for line in lines]
    except ValueError as error:
        raise RecipeError(f"{where}{error}. {_HINT}") from None
    return _BETWEEN_LINES.join(_BETWEEN_NUMBERS.join(map(str, row)) for row in rows)


def _tokens(word: str) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) < 16 and int(word) < _MOST_TOKENS):
        raise ValueError(f"{short_repr(word)} is not a number of tokens")
    return int(word)


def conflict(routing: str, *, experts: int, chosen: int, layers: int) -> str | None:
    """Why a routing does not fit `layers` with so many experts (0 without any), `chosen` per token; None if it does."""
    if routing != UNIFORM and not experts:
        return "the model has no experts. Leave it out"
    rows = [] if routing in (UNIFORM, WORST) else _rows(routing)
    if rows and len(rows) not in (1, layers):
        return f"{len(rows)} lines for {layers} layers with experts. Give one for all, or one for each"
    wrong = (_wrong_row(row, experts, chosen) for row in rows)
    return next((f"line {number} {problem}" for number, problem in enumerate(wrong, 1) if problem is not None), None)


def _wrong_row(row: Sequence[int], experts: int, chosen: int) -> str | None:
    if len(row) != experts:
        return f"has {len(row)} numbers for {experts} experts. Give one for each"
    if not sum(row):
        return "gives tokens to no expert"
    if max(row) * chosen > sum(row):
        return f"gives an expert more than every token once, with {chosen} experts per token"
    return None


def has_line_per_layer(routing: str) -> bool:
    """Whether layers may differ."""
    return _BETWEEN_LINES in routing


def tokens_per_expert(routing: str, layer: int, *, tokens: int, experts: int, chosen: int) -> tuple[int, ...]:
    """The tokens that each expert of one of the layers with experts receives; each token goes to `chosen` of them.

    Shares are scaled to the tokens; what is left after rounding goes to the largest fractions.
    """
    if routing == UNIFORM:
        row: Sequence[int] = [1] * experts
    elif routing == WORST:
        row = [1] * chosen + [0] * (experts - chosen)
    else:
        rows = _rows(routing)
        row = rows[layer if len(rows) > 1 else 0]
    pairs, whole = tokens * chosen, sum(row)
    counts = [share * pairs // whole for share in row]
    left = pairs - sum(counts)
    for index in sorted(range(experts), key=lambda index: -(row[index] * pairs % whole))[:left]:
        counts[index] += 1
    return tuple(counts)


def _rows(routing: str) -> list[list[int]]:
    return [[int(word) for word in line.split(_BETWEEN_NUMBERS)] for line in routing.split(_BETWEEN_LINES)]
