"""The largest tile of the row kernels that read words in pairs; torch and Triton are not imported."""

PAIRS_THREADS = 1024
# words that a thread has next to each other, and how often
WORDS_OF_THREAD = 8
PAIRS_DEPTH = 4
PAIRS_TILE_WORDS = PAIRS_THREADS * PAIRS_DEPTH * WORDS_OF_THREAD
