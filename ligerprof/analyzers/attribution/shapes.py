"""Recognize the head's output [T, V] by sizes: of a table [V, D], of the tokens [T, D] looked up in it, and its own."""

from itertools import product
from typing import NamedTuple

import numpy as np

from ligerprof.snapshots.distinct import distinct
from ligerprof.snapshots.trace import Int64s

# bytes of a number of the table, of the looked-up tokens, and of the head's output
_WIDTHS = np.array(list(product((2, 4), repeat=3)), dtype=np.int64)
_LEAST_HIDDEN_SIZE = 8
# models have far fewer tables, and batches far fewer lengths; each pair of sizes takes time
_MOST_SIZES = 64


class Shape(NamedTuple):
    """The shape of a head's output, and the bytes of a vector of D numbers in the table's dtype."""

    tokens: int
    words: int
    hidden_bytes: int


def shapes_of(
    output_bytes: int, tables: Int64s, looked_up: Int64s, *, padding: int = 1, casts: bool = False
) -> list[Shape]:
    """Every shape for which a table, looked-up tokens and the output fit together; of many sizes, the largest count.

    Sizes of layers are products of small numbers, and many of them fit by chance. A vocabulary has more words than a
    vector has numbers, except one of characters, whose logits take little memory.

    Args:
        padding: rows of the output may be padded to a multiple of this many numbers.
        casts: whether looked-up tokens may have another dtype than the table.
    """
    tables, looked_up = (distinct(sizes)[-_MOST_SIZES:, None] for sizes in (tables, looked_up))
    widths = _WIDTHS if casts else _WIDTHS[_WIDTHS[:, 0] == _WIDTHS[:, 1]]
    table, found = tables[:, None] // widths[:, 0], looked_up[None] // widths[:, 1]
    scores = np.maximum(output_bytes // widths[:, 2], 1)
    hidden = np.rint(np.sqrt(table / scores * found)).astype(np.int64)
    is_wide = (hidden >= _LEAST_HIDDEN_SIZE) & (hidden < table // np.maximum(hidden, 1))
    hidden = np.maximum(hidden, 1)
    words, tokens = table // hidden, found // hidden
    fits = is_wide & (words * hidden == table) & (tokens * hidden == found) & (output_bytes % widths[:, 2] == 0)
    fits &= (tokens * words == scores) | (tokens * -(-words // padding) * padding == scores)
    places = np.nonzero(fits)
    columns = (tokens[fits], words[fits], hidden[fits] * widths[places[2], 0])
    return list(map(Shape, *(column.tolist() for column in columns)))
