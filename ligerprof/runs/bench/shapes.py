"""The sizes that kernels are measured at: the 2024 study's, the Liger paper's, and those of models."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ligerprof.errors import RecipeError
from ligerprof.kernels.slots import SLOTS
from ligerprof.kernels.spec import KernelShape
from ligerprof.models import load_model
from ligerprof.text import short_repr, whole_number
from ligerprof.words import did_you_mean

_SLOTS = {name: slot for slot in SLOTS.values() for name in slot.benched}
BENCH_KERNELS = tuple(_SLOTS)

_SEQ_LEN = 2048
_MODEL_TOKENS = 8192
_LLAMAS = ("llama3.2-1b", "llama3.2-3b", "llama3.1-8b", "llama3.1-70b")
_ALIASES = {"A": "llama3.2-1b@4096", "B": "llama3.2-1b@16384", "C": "llama3.1-8b@8192"}
_PAPER_SIZES = {"V": (40960, 81920, 122880, 163840), "T": (4096, 8192, 12288, 16384), "H": (4096, 8192, 12288, 16384)}
_VARIED = re.compile(r"([VTH])=([1-9][0-9]{0,8})")
# eight key heads for thirty-two query heads, as in Llama 3
_QUERIES_PER_KEY = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchShape:
    """The sizes of one measurement, under a name for tables and axes; each kernel uses some of them."""

    name: str
    sequences: int
    seq_len: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def tokens(self) -> int:
        """Rows of the hidden states: the tokens of all sequences."""
        return self.sequences * self.seq_len

    def of_a_call(self, *, element_bytes: int, sm_count: int) -> KernelShape:
        """The sizes of one call on activations and weights of one dtype."""
        return KernelShape(
            tokens=self.tokens,
            sequences=self.sequences,
            hidden=self.hidden,
            intermediate=self.intermediate,
            vocab=self.vocab,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            activation_bytes=element_bytes,
            parameter_bytes=element_bytes,
            sm_count=sm_count,
        )


# small enough that the device waits for the host
TINY = BenchShape(
    name="tiny", sequences=2, seq_len=32, hidden=256, intermediate=512, vocab=2048, heads=4, kv_heads=2, head_dim=64
)


def find_kernels(names: Sequence[str]) -> tuple[str, ...]:
    """The named kernels, each once, or every kernel for `all`; raises RecipeError for an unknown name."""
    if "all" in names:
        return BENCH_KERNELS
    for name in names:
        if name not in BENCH_KERNELS:
            meant = did_you_mean(name, BENCH_KERNELS)
            raise RecipeError(f"unknown kernel {short_repr(name)}.{meant} Known: {', '.join(BENCH_KERNELS)}, or all.")
    return tuple(dict.fromkeys(names))


def find_shapes(kernel: str, text: str) -> tuple[BenchShape, ...]:
    """Parse `study`, `paper`, `llama`, A, B, C, V=…, T=…, H=…, or a model with `@TOKENS`; several joined by commas.

    Raises:
        RecipeError: a word is invalid (UnknownModelError: it is not a known model).
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise RecipeError("no shape given. Use study, paper, llama, A, B, C, or a model such as llama3.1-8b@8192.")
    shapes = [shape for word in words for shape in _read_word(kernel, word)]
    return tuple({shape.name: shape for shape in shapes}.values())


def _read_word(kernel: str, word: str) -> Iterable[BenchShape]:
    if word == "study":
        return [_named(name) for name in (_ALIASES if kernel == "flce" else ("C",))]
    if word == "llama":
        return [_named(name) for name in _LLAMAS]
    if word == "paper":
        letter = _SLOTS[kernel].varied
        return [_varied(kernel, letter, size) for size in _PAPER_SIZES[letter]]
    if (match := _VARIED.fullmatch(word)) is not None:
        return [_varied(kernel, match.group(1), int(match.group(2)))]
    return [_named(word)]


def _named(word: str) -> BenchShape:
    model, _, count = _ALIASES.get(word, word).partition("@")
    if count and not whole_number(count):
        raise RecipeError(f"{word!r}: {count!r} is not a number of tokens. Write it as llama3.1-8b@8192.")
    tokens = int(count) if count else _MODEL_TOKENS
    sequences = tokens // _SEQ_LEN if tokens % _SEQ_LEN == 0 else 1
    return shape_of_model(model, name=word, sequences=sequences, seq_len=tokens // sequences)


def shape_of_model(model: str, *, name: str, sequences: int, seq_len: int) -> BenchShape:
    """The sizes of a model.

    Raises:
        UnknownModelError: it is not a known model.
    """
    spec = load_model(model)
    return BenchShape(
        name=name,
        sequences=sequences,
        seq_len=seq_len,
        hidden=spec.hidden_size,
        intermediate=spec.intermediate_size,
        vocab=spec.vocab_size,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
    )


def _varied(kernel: str, letter: str, size: int) -> BenchShape:
    """The base shape with another vocabulary (V), a single sequence of length T, or another hidden size (H)."""
    name, base = f"{letter}={size}", _named("C")
    if letter == "V":
        return dataclasses.replace(base, name=name, vocab=size)
    if letter == "T":
        # the paper's gated layers are those of Llama 2 7B
        model = _named("llama2-7b") if _SLOTS[kernel].varied == "T" else base
        return dataclasses.replace(model, name=name, sequences=1, seq_len=size)
    heads = size // base.head_dim
    if heads * base.head_dim != size or heads % _QUERIES_PER_KEY:
        raise RecipeError(
            f"{name!r} is not a hidden size of whole heads. Use a multiple of {_QUERIES_PER_KEY * base.head_dim}."
        )
    return dataclasses.replace(base, name=name, hidden=size, heads=heads, kv_heads=heads // _QUERIES_PER_KEY)
