"""Tiles of the row kernels that read words in pairs, and how long they take; torch and Triton are not imported."""

from collections.abc import Sequence

from ligerprof.kernels.sizes import round_up

# rows of more words than this are read in pairs, if they can be; narrower rows are left to smaller programs
PAIRED_WORDS = 65536
# rows in blocks of no more words than this, if they are not read in pairs, are read by many small programs
SHORT_WORDS = 16384
PAIRS_THREADS = 1024
# consecutive words per thread, and the most groups of so many that a thread has of a tile
WORDS_OF_THREAD = 8
PAIRS_DEPTH = 4

# relative to tiles of the largest depth without empty places, measured on an H200 with blocks of 4016 to 64128 words
# (benchmarks/NOTES.md). Empty places cost instructions, but no memory traffic
_TIME_OF_DEPTH = {4: 1.0, 2: 1.03, 1: 1.15}
_SHARE_OF_PLACES = 0.6
# of the row kernel that does not read in pairs
OTHER_TIME = 1.2


def tile_words(depth: int) -> int:
    """Words of one tile."""
    return PAIRS_THREADS * depth * WORDS_OF_THREAD


def fastest_depth(sizes: Sequence[int]) -> tuple[float, int]:
    """The time of rows in blocks of these sizes, for tiles that lie in one block each, and the tiles' depth.

    The time is relative to that of rows whose words fill the largest tiles.
    """

    def time(depth: int) -> float:
        places = sum(round_up(size, tile_words(depth)) for size in sizes)
        return _TIME_OF_DEPTH[depth] * (1 + _SHARE_OF_PLACES * (places / sum(sizes) - 1))

    return min((time(PAIRS_DEPTH >> halvings), PAIRS_DEPTH >> halvings) for halvings in range(PAIRS_DEPTH.bit_length()))
