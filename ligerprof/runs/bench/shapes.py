"""Which sizes kernels are measured at: the studied ones, the Liger paper's, and those of named models."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ligerprof.errors import RecipeError
from ligerprof.models import load_model

BENCH_KERNELS = ("flce", "ce", "rms", "add_rms", "layernorm", "rope", "swiglu", "geglu")

_SEQ_LEN = 2048
_MODEL_TOKENS = 8192
_LLAMAS = ("llama3.2-1b", "llama3.2-3b", "llama3.1-8b", "llama3.1-70b")
_ALIASES = {"A": "llama3.2-1b@4096", "B": "llama3.2-1b@16384", "C": "llama3.1-8b@8192"}
_PAPER_VOCABULARIES = (40960, 81920, 122880, 163840)
_PAPER_LENGTHS = (4096, 8192, 12288, 16384)
_PAPER_HIDDEN_SIZES = (4096, 8192, 12288, 16384)
# the paper's gated layers are Llama 2 7B's
_PAPER_GATED_MODEL = "llama2-7b"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchShape:
    """The sizes of one measurement; each kernel reads those it knows.

    Attributes:
        name: what it is called in tables and on axes.
    """

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
        """Rows of the hidden states: all sequences' tokens."""
        return self.sequences * self.seq_len

    def sizes(self, kernel: str) -> str:
        """The sizes that `kernel` depends on, such as `4096x2048x128256`."""
        return _SIZES[kernel](self)


def _norm_sizes(shape: BenchShape) -> str:
    return f"{shape.tokens}x{shape.hidden}"


def _gated_sizes(shape: BenchShape) -> str:
    return f"{shape.tokens}x{shape.intermediate}"


_SIZES: dict[str, Callable[[BenchShape], str]] = {
    "flce": lambda shape: f"{shape.tokens}x{shape.hidden}x{shape.vocab}",
    "ce": lambda shape: f"{shape.tokens}x{shape.vocab}",
    "rms": _norm_sizes,
    "add_rms": _norm_sizes,
    "layernorm": _norm_sizes,
    "rope": lambda shape: f"{shape.sequences}x{shape.seq_len}x({shape.heads}+{shape.kv_heads})x{shape.head_dim}",
    "swiglu": _gated_sizes,
    "geglu": _gated_sizes,
}

# small enough that the device waits for the host
TINY = BenchShape(
    name="tiny",
    sequences=2,
    seq_len=32,
    hidden=256,
    intermediate=512,
    vocab=2048,
    heads=4,
    kv_heads=2,
    head_dim=64,
)


def find_kernels(names: Sequence[str]) -> tuple[str, ...]:
    """The kernels that were asked for, `all` being every one.

    Raises:
        RecipeError: an unknown name.
    """
    if "all" in names:
        return BENCH_KERNELS
    for name in names:
        if name not in BENCH_KERNELS:
            raise RecipeError(f"unknown kernel {name!r}. Known: {', '.join(BENCH_KERNELS)}, or all.")
    return tuple(dict.fromkeys(names))


def find_shapes(kernel: str, text: str) -> tuple[BenchShape, ...]:
    """Read `study`, `paper`, `llama`, A, B, C, or a model with `@TOKENS`; several joined by commas.

    Raises:
        RecipeError: an unknown word (UnknownModelError: one that is no model either).
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise RecipeError("no shape is named. Give study, paper, llama, A, B, C, or a model such as llama3.1-8b@8192.")
    shapes = [shape for word in words for shape in _read_word(kernel, word)]
    return tuple({shape.name: shape for shape in shapes}.values())


def _read_word(kernel: str, word: str) -> Iterable[BenchShape]:
    if word == "study":
        return [_named(name) for name in (_ALIASES if kernel == "flce" else ("C",))]
    if word == "llama":
        return [_named(name) for name in _LLAMAS]
    if word == "paper":
        return _paper_shapes(kernel)
    return [_named(word)]


def _named(word: str) -> BenchShape:
    model, _, count = _ALIASES.get(word, word).partition("@")
    if count and not (count.isdecimal() and int(count) > 0):
        raise RecipeError(f"{word!r} asks for {count!r} tokens. Write it as llama3.1-8b@8192.")
    tokens = int(count) if count else _MODEL_TOKENS
    spec = load_model(model)
    whole = tokens % _SEQ_LEN == 0
    return BenchShape(
        name=word,
        sequences=tokens // _SEQ_LEN if whole else 1,
        seq_len=_SEQ_LEN if whole else tokens,
        hidden=spec.hidden_size,
        intermediate=spec.intermediate_size,
        vocab=spec.vocab_size,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
    )


def _paper_shapes(kernel: str) -> list[BenchShape]:
    """What the Liger paper varies for this kernel: the vocabulary, the sequence, or the hidden size."""
    base = _named("C")
    if kernel in ("flce", "ce"):
        return [dataclasses.replace(base, name=f"V={vocab}", vocab=vocab) for vocab in _PAPER_VOCABULARIES]
    if kernel in ("swiglu", "geglu"):
        gated = _named(_PAPER_GATED_MODEL)
        return [
            dataclasses.replace(gated, name=f"T={length}", sequences=1, seq_len=length) for length in _PAPER_LENGTHS
        ]
    return [
        dataclasses.replace(base, name=f"H={hidden}", hidden=hidden, heads=heads, kv_heads=heads // 4)
        for hidden in _PAPER_HIDDEN_SIZES
        for heads in [hidden // base.head_dim]
    ]
