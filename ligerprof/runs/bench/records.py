"""What bench writes: records of times, errors and bytes, and the shapes they are measured at."""

import csv
import dataclasses
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from ligerprof.errors import LigerprofError, RecipeError
from ligerprof.files import FileKind, parse_object, read_text
from ligerprof.kernels.selection import SLOTS
from ligerprof.kernels.spec import KernelShape
from ligerprof.models import load_model
from ligerprof.serialization import SCHEMA, to_json
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
        sizes = {
            each.name: getattr(self, each.name) for each in dataclasses.fields(KernelShape) if hasattr(self, each.name)
        }
        return KernelShape(**sizes, activation_bytes=element_bytes, parameter_bytes=element_bytes, sm_count=sm_count)


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
    """Parse `study`, `paper`, `llama`, A, B, C, V=…, T=…, H=… or MODEL@TOKENS, joined by commas; raises RecipeError."""
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
    """The sizes of a model; raises UnknownModelError if it is not known."""
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


class BenchFileError(LigerprofError):
    """A file of bench records that cannot be read."""


_FILE = FileKind(error=BenchFileError, hint="Give a file that `ligerprof bench -o` wrote.")


class Direction(str, Enum):
    """The timed pass; `full` is forward and backward in one."""

    FORWARD = "forward"
    BACKWARD = "backward"
    FULL = "full"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A kernel of a provider, such as `ligerprof:lean`, at the sizes that it depends on, such as `4096x2048x128256`."""

    kernel: str
    provider: str
    shape: str
    sizes: str
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeRecord:
    """The time of one direction.

    Attributes:
        median_seconds, low_seconds, high_seconds: median, 20 % and 80 % quantile of the device time.
        floor: `products` (the three matrix products alone), `copy` (of as many bytes as the operation must move), or
            empty; timed in turns with the kernel.
        floor_share: floor over median.
        copy_rate_share: the fewest bytes over the median, as a share of a 1 GiB copy's bandwidth; for `copy` only.
        extra_peak_bytes: peak of a forward and backward pass, minus the bytes allocated before it.
    """

    what: ClassVar[str] = "time"
    subject: Subject
    direction: Direction
    median_seconds: float
    low_seconds: float
    high_seconds: float
    repetitions: int
    floor: str = ""
    floor_seconds: float | None = None
    floor_share: float | None = None
    copy_rate_share: float | None = None
    extra_peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorRecord:
    """The relative Frobenius error of one result against fp64.

    Attributes:
        regime: the data: `random init`, `std 5`, …
        tensor: `loss`, `output`, or a gradient such as `d_hidden`.
        chunks: passes over the head's weight, None if unknown.
        eager_error: the error of torch's eager reference on the same data.
        ratio: error over eager_error, None if that is zero.
    """

    what: ClassVar[str] = "error"
    subject: Subject
    regime: str
    tensor: str
    error: float
    eager_error: float
    ratio: float | None
    chunks: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRecord:
    """The host's cost of both passes at a tiny shape: time, waits for the device, torch's message about the first."""

    what: ClassVar[str] = "host"
    subject: Subject
    host_seconds: float
    synchronizations: int
    synchronization: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingRecord:
    """A provider without a result, and the reason."""

    what: ClassVar[str] = "missing"
    subject: Subject
    reason: str


Record = TimeRecord | ErrorRecord | HostRecord | MissingRecord
_KINDS: dict[str, type[Any]] = {kind.what: kind for kind in (TimeRecord, ErrorRecord, HostRecord, MissingRecord)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A record and the environment it was measured in: `gpu`, `date` (UTC) and versions."""

    record: Record
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, ...]:
        """Findings with the same key measure the same thing on the same GPU with the same versions."""
        record = self.record
        details = [str(getattr(record, name, "")) for name in ("direction", "regime", "tensor")]
        versions = [f"{name}={text}" for name, text in sorted(self.environment.items()) if name != "date"]
        return (record.what, *dataclasses.astuple(record.subject), *details, *versions)

    def row(self) -> dict[str, Any]:
        """One flat JSON object."""
        own = to_json(self.record)
        subject = own.pop("subject")
        if "direction" in own:
            own = {"pass": own.pop("direction"), **own}
        return {"schema": SCHEMA, "what": self.record.what, **subject, **own, **self.environment}


def finding_from_row(row: Mapping[str, Any]) -> Finding:
    """Parse the result of `Finding.row`; raises BenchFileError for anything else."""
    left = dict(row)
    try:
        if left.pop("schema") != SCHEMA:
            raise BenchFileError(f"a record of schema {row['schema']}; this version reads {SCHEMA}.")
        kind = _KINDS[left.pop("what")]
        subject = Subject(**{item.name: left.pop(item.name) for item in dataclasses.fields(Subject)})
        if "pass" in left:
            left["direction"] = Direction(left.pop("pass"))
        own = {item.name: left.pop(item.name) for item in dataclasses.fields(kind) if item.name in left}
        return Finding(
            record=kind(subject=subject, **own), environment={name: str(text) for name, text in left.items()}
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BenchFileError(f"not a bench record ({type(error).__name__}: {error}).") from None


def write_lines(findings: Iterable[Finding]) -> str:
    """The findings as JSON Lines."""
    return "".join(json.dumps(finding.row()) + "\n" for finding in findings)


def read_lines(path: Path) -> list[Finding]:
    """Findings of a JSON Lines file; raises BenchFileError, with file and line, for a line that is not a record."""
    findings = []
    for number, line in enumerate(read_text(path, _FILE).splitlines(), start=1):
        source = f"{path}, line {number}"
        row = parse_object(line, source, _FILE)
        try:
            findings.append(finding_from_row(row))
        except BenchFileError as error:
            raise BenchFileError(f"{source}: {error} {_FILE.hint}") from None
    return findings


def join_findings(*groups: Sequence[Finding]) -> tuple[Finding, ...]:
    """Join groups of findings in order; of those with the same key the last counts."""
    return tuple({finding.key: finding for group in groups for finding in group}.values())


def write_csv(findings: Sequence[Finding]) -> str:
    """CSV with one line per finding and the columns of all kinds; cells that a kind lacks are empty."""
    rows = [finding.row() for finding in findings]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()
