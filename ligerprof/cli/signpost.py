"""Signposts: what a file or folder is that a command cannot read, and which command reads it."""

import re
import shlex
from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from itertools import islice
from pathlib import Path

from ligerprof.files import UnpackError, is_file, is_folder, opened, unpacked
from ligerprof.snapshots import SNAPSHOT_NAME

_PREFIX_BYTES = 2**18
_RESULT, _CELLS, _MODEL = "result.json", "results.jsonl", "config.json"
_MOST_ENTRIES = 1000
_OWN_KIND = re.compile(rb'\s*\{\s*"schema"\s*:\s*1\s*,\s*"kind"\s*:\s*"([a-z-]{1,30})"')
_PAGE = re.compile(rb"(?i)\s*<(?:!doctype|html|!--|head)")
# the longest header of a file of safetensors
_LONGEST_HEADER_BYTES = 100_000_000
_RECIPES = frozenset({"step", "estimate", "fit", "advise", "sweep"})


class InputKind(Enum):
    """A kind of file or folder: what it is, the commands that read it, and what to do with it."""

    TRACE = ("a profiler trace", {"trace"}, "Run `ligerprof trace {path}`.")
    SNAPSHOT = ("a memory snapshot", {"explain", "diff", "compare", "plot"}, "Run `ligerprof explain {path}`.")
    RUN = (
        "a run directory",
        {"explain", "diff", "compare", "plot", "trace", "view"},
        "Run `ligerprof explain {path}` or `ligerprof compare {path}`.",
    )
    SWEEP = ("the folder of a sweep", {"plot", "sweep", "study"}, "Run `ligerprof plot {path}`.")
    CELLS = ("the results of a sweep", {"plot"}, "Run `ligerprof plot {path}`.")
    FIGURES = ("the result of a step", {"compare", "plot"}, "Run `ligerprof compare {path}`.")
    ESTIMATE = ("an estimate", {"compare"}, "Run `ligerprof compare {path} OTHER`.")
    PEAK = ("the JSON of a peak", {"compare", "diff"}, "Run `ligerprof diff {path} OTHER`.")
    BENCH = ("records of a bench", {"bench"}, "Run `ligerprof bench --from {path}`.")
    OUTPUT = ("the output of another command", set[str](), "Run the command on the file that the output is about.")
    RECIPE = ("a recipe", _RECIPES, "Run `ligerprof estimate --config {path}`.")
    TRAINING = ("the configuration of a training", _RECIPES, "Run `ligerprof estimate --config {path}`.")
    MODEL = ("the configuration of a model", {"kernels", *_RECIPES}, "Run `ligerprof estimate --model {path}`.")
    PAGE = ("a page for a browser", set[str](), "Give the recording that it was made from.")
    WEIGHTS = (
        "a file of weights or of torch.save()",
        set[str](),
        "Record memory with `ligerprof run -- COMMAND` or torch.cuda.memory._dump_snapshot().",
    )
    EMPTY = ("empty", set[str](), "Did the program that writes it end early?")

    def __init__(self, noun: str, commands: Iterable[str], advice: str) -> None:
        self.noun, self.commands, self.advice = noun, frozenset(commands), advice


def signposted(message: str, given: Iterable[object], command: str, configs: Collection[object] = ()) -> str | None:
    """A better message for an error about a path that was given to a command; None if there is none.

    Args:
        given: values of the command's arguments and options; only text and paths count.
        configs: values of its --config, which reads the configuration of a training.
    """
    for text in sorted({text for value in given for text in _texts(value)}, key=len, reverse=True):
        if not re.match(rf"{re.escape(text)}(?![\w.-])", message):
            continue
        path = Path(text.rpartition("=")[2])
        runs = list(_runs(path))
        if runs and not _kind_of_folder(path):
            return f"{text}: a folder of {len(runs)} run{'s' * (len(runs) > 1)}, such as {runs[0]}. Give one of them."
        kind = kind_of(path)
        if kind is InputKind.TRAINING and text in configs:
            continue
        if kind is not None and command not in kind.commands:
            reader = "" if kind is InputKind.EMPTY else f", which `ligerprof {command}` does not read"
            return f"{text}: this is {kind.noun}{reader}. {kind.advice.format(path=shlex.quote(str(path)))}"
    return None


def kind_of(path: Path) -> InputKind | None:
    """What a file or folder is, by its first bytes or its entries; None if that is not known."""
    try:
        if is_folder(path):
            return _kind_of_folder(path)
        if not is_file(path):
            return None
        with opened(path) as file:
            chunks = unpacked(file, lambda _packed_bytes: 2**62, "")
            start = file.read(_PREFIX_BYTES) if chunks is None else next(chunks, b"")[:_PREFIX_BYTES]
    except (OSError, UnpackError):
        return None
    if path.suffix in _YAML or start.lstrip().startswith((b"{", b"[", b"<")):
        return _kind_of_text(start)
    return _kind_of_binary(start)


def _texts(value: object) -> Iterator[str]:
    """The paths in a value of an argument or option."""
    if isinstance(value, (str, Path)) and str(value):
        yield str(value)
    elif isinstance(value, tuple):
        for item in value:
            yield from _texts(item)


def _kind_of_folder(path: Path) -> InputKind | None:
    if (path / SNAPSHOT_NAME).is_file() or (path / _RESULT).is_file():
        return InputKind.RUN
    if (path / _CELLS).is_file():
        return InputKind.SWEEP
    return InputKind.MODEL if (path / _MODEL).is_file() else None


def _runs(path: Path) -> Iterator[Path]:
    if not is_folder(path):
        return
    for entry in sorted(islice(path.iterdir(), _MOST_ENTRIES)):
        if entry.is_dir() and _kind_of_folder(entry) is InputKind.RUN:
            yield entry


def _kind_of_binary(start: bytes) -> InputKind | None:
    if not start.strip():
        return InputKind.EMPTY
    if start.startswith(b"\x80"):
        return InputKind.SNAPSHOT if b"segments" in start or b"device_traces" in start else None
    # the header of a safetensors file is JSON after eight bytes of its length
    is_header = start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= _LONGEST_HEADER_BYTES
    return InputKind.WEIGHTS if start.startswith(b"PK\x03\x04") or is_header else None


def _kind_of_text(start: bytes) -> InputKind | None:
    if _PAGE.match(start) is not None:
        return InputKind.PAGE
    if (own := _OWN_KIND.match(start)) is not None:
        return _OWN.get(own[1].decode("ascii"), InputKind.OUTPUT)
    for kind, keys in _KEYS:
        if any(re.search(rb'(?m)(^\s*|")%s"?\s*:' % key, start) for key in keys):
            return kind
    return None


_OWN = {
    "step": InputKind.FIGURES,
    "estimate": InputKind.ESTIMATE,
    "peak": InputKind.PEAK,
    "cell": InputKind.CELLS,
    "bench": InputKind.BENCH,
}
_YAML = frozenset({".yaml", ".yml"})
# keys of transformers and TRL, of axolotl, and of LLaMA-Factory
_TRAINING = (b"per_device_train_batch_size", b"model_name_or_path", b"micro_batch_size", b"base_model")
# keys that decide, the most telling first
_KEYS = (
    (InputKind.TRACE, (b"traceEvents", b"deviceProperties", b"displayTimeUnit")),
    (InputKind.BENCH, (b"host_seconds", b"median_seconds")),
    (InputKind.RECIPE, (b"checkpoint_every", b"flce_budget")),
    (InputKind.TRAINING, (*_TRAINING, b"zero_optimization", b"train_micro_batch_size_per_gpu")),
    (InputKind.MODEL, (b"model_type", b"hidden_size")),
)
