"""Sizes of the chunks in which losses over a vocabulary compute their logits, and what each chunk allocates."""

from dataclasses import dataclass

from ligerprof.torch_memory.dtypes import FP32_BYTES, HALF_BYTES, INDEX_BYTES, Scratch

# TRL 1.14, trl/trainer/sft_trainer.py: _CHUNKED_LM_HEAD_CHUNK_SIZE
TRL_CHUNK_TOKENS = 256
# TRL 1.16, trl/kernels/chunked_logprob.py: TOKEN_CHUNK_SIZE; trl/trainer/utils.py: _CHUNKED_LOGPROB_CHUNK_SIZE
TRL_TILE_TOKENS = 4096
TRL_TILE_WORDS = 32_768
# per token that forward of TRL's function makes; a name of two of them holds one
_STATISTICS = 7
# torchtitan, torchtitan/components/loss.py: ChunkedLossWrapper.Config.num_chunks
TITAN_CHUNKS = 8


def linear_cross_entropy_rows(tokens: int, hidden: int, vocab: int) -> int:
    """Rows of a chunk of F.linear_cross_entropy on CUDA with default options, which are `aspect_ratio:2`.

    From torch/nn/modules/linear_cross_entropy_options.py of torch 2.13 (_compute_batch_chunk_size).
    """
    target = -(-tokens // -(-vocab // hidden))
    power = 1 << max(target - 1, 0).bit_length()
    return max(1, min(power // 2, tokens))


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearCrossEntropy:
    """Blocks of F.linear_cross_entropy with default options on CUDA, where `acc_policy` is `compact`.

    From torch/nn/modules/linear_cross_entropy.py of torch 2.13 (_ChunkContext and the loop over its chunks). The
    gradients are computed in forward; backward multiplies them in place.

    Attributes:
        width: bytes per element of hidden states and weight.
        is_bfloat16: whether 16-bit inputs are bf16.
        input_gradient, weight_gradient: whether these gradients are computed.
        capability: compute capability of the GPU, which decides whether 16-bit products have fp32 results.
    """

    tokens: int
    hidden: int
    vocab: int
    width: int
    is_bfloat16: bool
    input_gradient: bool
    weight_gradient: bool
    capability: tuple[int, int]

    @property
    def input_gradient_bytes(self) -> int:
        """Gradient of the hidden states, kept until backward."""
        return self.tokens * self.hidden * self.width if self.input_gradient else 0

    @property
    def weight_gradient_bytes(self) -> int:
        """Gradient of the weight, kept until backward."""
        return self.vocab * self.hidden * self.width if self.weight_gradient else 0

    @property
    def buffer_sizes(self) -> tuple[int, ...]:
        """Blocks that live as long as the call, in the order of their allocation, besides the gradients."""
        logits_width = FP32_BYTES if self._upcasts else self.width
        # a mask, the labels without ignored ones, and a factor, per token
        per_token = (self.tokens, self.tokens * INDEX_BYTES, self.tokens * (FP32_BYTES if self._widens else self.width))
        # the chunk's logits, which become their gradient in place, and a number per row
        chunk = (self._rows * self.vocab * logits_width, self._rows * logits_width)
        # an fp32 copy of the chunk's hidden states, for the weight's gradient of 16-bit inputs
        copies = self._rows * self.hidden * FP32_BYTES if self._widens and self.weight_gradient else 0
        return tuple(size for size in (*chunk, *per_token, copies) if size)

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Blocks that each chunk allocates: 16-bit gradients of its logits, and the weight's rows of its labels."""
        narrows = self._upcasts and (self.input_gradient or self.weight_gradient)
        narrow_bytes = self._rows * self.vocab * self.width if narrows else 0
        target_bytes = self._rows * self.hidden * self.width if self.input_gradient else 0
        return tuple(size for size in (narrow_bytes, target_bytes) if size)

    @property
    def temporary_bytes(self) -> int:
        """The most bytes that are allocated at once, besides the gradients."""
        return sum(self.buffer_sizes) + sum(self.chunk_sizes)

    @property
    def _rows(self) -> int:
        return linear_cross_entropy_rows(self.tokens, self.hidden, self.vocab)

    @property
    def _widens(self) -> bool:
        """Whether products of 16-bit inputs are summed in fp32 (_resolve_auto_acc_dtype)."""
        return self.width == HALF_BYTES and self.capability >= ((8, 0) if self.is_bfloat16 else (7, 0))

    @property
    def _upcasts(self) -> bool:
        """Whether logits are wider than the inputs; fp16 ones are not."""
        return self._widens and self.is_bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class TiledLogProbabilities:
    """Blocks of TRL's `ChunkedLogProbFunction` (trl/kernels/chunked_logprob.py of TRL 1.16), whose kernels make none.

    Attributes:
        tokens: tokens with a label.
        hidden_width, weight_width: bytes per element of hidden states and weight.
        width: bytes per element of the products' operands.
        input_gradient, weight_gradient: whether these gradients are computed.
    """

    tokens: int
    hidden: int
    vocab: int
    hidden_width: int
    weight_width: int
    width: int
    input_gradient: bool
    weight_gradient: bool

    @property
    def forward_scratch(self) -> tuple[Scratch, Scratch]:
        """Blocks before the results are there, and after: statistics, the buffer of one tile, and copies."""
        statistics_bytes = self.tokens * FP32_BYTES
        copies, kept = self._copies(keeps_words=False)
        made = (*(statistics_bytes,) * _STATISTICS, -statistics_bytes, self._buffer_bytes, *copies)
        freed = (*(-statistics_bytes,) * (_STATISTICS - 1), -self._buffer_bytes, *kept)
        return made, freed

    @property
    def backward_scratch(self) -> tuple[Scratch, Scratch]:
        """Blocks before the gradients are there, and after: fp32 sums of narrower gradients, buffer and copies.

        Sums that are gradients themselves come first.
        """
        wanted = (
            (self.tokens, self.hidden_width, self.input_gradient),
            (self.vocab, self.weight_width, self.weight_gradient),
        )
        sums = tuple(
            rows * self.hidden * FP32_BYTES for rows, width, is_made in wanted if is_made and width != FP32_BYTES
        )
        copies, kept = self._copies(keeps_words=True)
        freed = (*(-size_bytes for size_bytes in sums), -self._buffer_bytes, *kept)
        tiles = (self._buffer_bytes, *copies)
        is_first = any(width == FP32_BYTES and is_made for _, width, is_made in wanted)
        return (sums, (*tiles, *freed)) if is_first else ((*sums, *tiles), freed)

    @property
    def _buffer_bytes(self) -> int:
        """One tile; its buffer has all words of a tile, also for a smaller vocabulary."""
        return min(self.tokens, TRL_TILE_TOKENS) * TRL_TILE_WORDS * self.width

    def _copies(self, *, keeps_words: bool) -> tuple[Scratch, Scratch]:
        """Copies of hidden states and weight in the products' dtype, and how the last ones are freed.

        A copy of the hidden states lives until the next one is there, and one of the weight does if `keeps_words`.
        """
        events: list[int] = []
        of_tokens = of_words = 0
        for tokens in self._token_chunks if self.tokens else ():
            copy_bytes = tokens * self.hidden * self.width if self.hidden_width != self.width else 0
            events += (copy_bytes, -of_tokens)
            of_tokens = copy_bytes
            for words in self._word_chunks:
                copy_bytes = words * self.hidden * self.width if self.weight_width != self.width else 0
                events += (copy_bytes, -of_words if keeps_words else -copy_bytes)
                of_words = copy_bytes
        return tuple(filter(None, events)), tuple(filter(None, (-of_tokens, -of_words if keeps_words else 0)))

    @property
    def _token_chunks(self) -> tuple[int, ...]:
        return _chunks(self.tokens, TRL_TILE_TOKENS)

    @property
    def _word_chunks(self) -> tuple[int, ...]:
        return _chunks(self.vocab, TRL_TILE_WORDS)


def _chunks(whole: int, size: int) -> tuple[int, ...]:
    return tuple(min(size, whole - start) for start in range(0, whole, size))
