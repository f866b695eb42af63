"""The files that the commands read, small and undamaged, and the command that reads each of them."""

import itertools
import json
import lzma
import pickle
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from benchmarks.study.grids import load_study
from ligerprof.analyzers.attribution.rules import read_rules
from ligerprof.cli.main import main
from ligerprof.models.names import CONFIGS
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.bench.records import read_lines
from ligerprof.runs.recording.summary import RECORDING, RecordingSummary, read_summary
from ligerprof.runs.sweep.cells import read_cells
from ligerprof.serialization import to_json
from tests.paths import DATA, RECORDINGS, RESULTS
from tests.snapshots.mutations import originals

Read = Callable[[Path], object]
TRACE = DATA / "traces" / "llama3.2-1b-step.pt.trace.json.xz"
RULES = {"rule": [{"role": "kv_cache", "frame": "*cache.py:update", "phase": "forward"}]}
TRAINER = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": True, "optim": "adamw_torch"}
STUDY = Path("benchmarks/study")
_PER_FRAMEWORK = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One kind of file.

    Attributes:
        kind: of the table's row.
        suffix: of the file's name.
        values: what the file holds, for damage to its values; None if only its bytes are damaged.
        write: turns such values into a file.
        content: the file's bytes.
        read: reads the file; raises a LigerprofError or returns.
    """

    kind: str
    suffix: str
    content: bytes
    values: Any = None
    write: Callable[[Any], bytes] = lambda values: json.dumps(values).encode()
    read: Read


class UnexpectedEndError(Exception):
    """A command that ended in a way that its contract does not know."""


def by_command(*arguments: str, twice: bool = False) -> Read:
    """Run a command on the file: it must end in 0 with one JSON object or printable text, or in 1 or 2 with errors."""
    return lambda path: ran([*arguments, *[str(path)] * (1 + twice)])


def ran(arguments: list[str]) -> bool:
    """Whether a command ends in 0; it may refuse, but not end in any other way."""
    result = CliRunner().invoke(main, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code not in (0, 1, 2, 3):
        raise UnexpectedEndError(f"exit code {result.exit_code}")
    if not all(line.isprintable() for line in result.output.split("\n")):
        raise UnexpectedEndError("unprintable output")
    if result.exit_code == 1 and result.stderr.count("\n") != 1:
        raise UnexpectedEndError(f"more than a line of error: {result.stderr[:500]}")
    if result.exit_code == 0 and "--json" in arguments:
        require_sums(json.loads(result.stdout))
    return result.exit_code == 0


def require_sums(report: dict[str, Any]) -> None:
    """Roles add up to the peak, and those of a failure to what was allocated then."""
    if report["kind"] != "peak":
        return
    if sum(report["roles"].values()) != report["peak_bytes"]:
        raise UnexpectedEndError("roles do not add up to the peak")
    oom = report["oom"]
    if oom is not None and sum(oom["roles"].values()) != oom["allocated_bytes"]:
        raise UnexpectedEndError("roles do not add up to what was allocated at the failure")


def by_function(read: Read) -> Read:
    """Call a function on the file; it must raise a LigerprofError or return."""

    def run(path: Path) -> bool:
        read(path)
        return True

    return run


def subjects() -> list[Subject]:
    """Every kind, the cheap ones several times with other commands."""
    return [*_snapshots(), *_traces(), *_results(), *_configs(), *_models(), *_lengths()]


def _snapshots() -> list[Subject]:
    found = []
    reads = itertools.cycle(
        [
            by_command("explain", "--json"),
            by_command("explain", "--stacks"),
            by_command("diff", twice=True),
            by_command("explain", "--format", "markdown"),
            by_command("compare", twice=True),
        ]
    )
    for values in originals().values():
        # pickled and loaded again, so that equal values share an object only if they do in a file
        whole = pickle.dumps(pickle.loads(pickle.dumps(values)))
        found.append(
            Subject(kind="snapshot", suffix=".pickle", values=pickle.loads(whole), content=whole, read=next(reads))
        )
        found.append(
            Subject(kind="packed snapshot", suffix=".xz", content=lzma.compress(whole, preset=1), read=next(reads))
        )
    # the last one is a recording
    found.append(Subject(kind="snapshot", suffix=".pickle", values=values, content=whole, read=among_ranks(whole)))
    return found


def among_ranks(whole: bytes) -> Read:
    """Read a folder in which the file is one of two ranks."""

    def run(path: Path) -> object:
        directory = path.with_suffix(".ranks")
        directory.mkdir()
        (directory / "rank0.pickle").write_bytes(whole)
        (directory / "rank1.pickle").write_bytes(path.read_bytes())
        try:
            return by_command("explain")(directory)
        finally:
            shutil.rmtree(directory)

    return run


def as_text(*arguments: str) -> Read:
    """Run a command with the file's text as its last argument, where it can be one."""

    def run(path: Path) -> object:
        text = path.read_bytes().decode(errors="surrogateescape").replace("\0", "")
        return ran([*arguments, text])

    return run


def _json(kind: str, values: Any, read: Read) -> Subject:
    return Subject(kind=kind, suffix=".json", values=values, content=json.dumps(values).encode(), read=read)


def _traces() -> list[Subject]:
    trace = json.loads(lzma.decompress(TRACE.read_bytes()))
    # metadata, and events of all categories
    events = trace["traceEvents"]
    trace["traceEvents"] = [*events[:20], *events[20 :: max(1, len(events) // 150)]]
    return [
        _json("trace", trace, by_command("trace")),
        _json("trace", trace, by_command("trace", "--json")),
        _json("trace", trace["traceEvents"], by_command("trace", twice=True)),
    ]


def _results() -> list[Subject]:
    runner = CliRunner()
    estimate = json.loads(runner.invoke(main, ["estimate", "--model", "tiny", "--json"]).stdout)
    baseline = json.loads(
        runner.invoke(main, ["explain", str(RECORDINGS / "small-own-all-python.pickle.xz"), "--json"]).stdout
    )
    rows = (RESULTS / "steps-h200.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    records = (RESULTS / "kernels-h200.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    summary = to_json(
        RecordingSummary(rank=0, pid=7, argv=("train.py", "--lr", "1"), started_us=10, steps=3, last_recorded=2)
    )
    return [
        _json("result", estimate, by_command("compare", twice=True)),
        _json("result", baseline, by_command("diff", twice=True)),
        _json("result", baseline, by_command("diff", "--format", "markdown", twice=True)),
        _json("result", baseline, by_command("compare", twice=True)),
        _json("result", estimate, in_directory("result.json", by_command("compare", twice=True))),
        _json("result", json.loads(rows[0]), by_function(lambda path: read_cells([path]))),
        _json("result", summary, in_directory(RECORDING, by_function(read_summary))),
        _lines(rows, by_function(lambda path: read_cells([path]))),
        _lines(rows, in_directory("results.jsonl", by_command("sweep", "--model", "tiny", "--dry-run", "-o"))),
        _lines(records, by_function(read_lines)),
    ]


def in_directory(name: str, read: Read) -> Read:
    """Read a directory that contains the file under some name."""

    def run(path: Path) -> object:
        directory = path.with_suffix(".run")
        directory.mkdir()
        (directory / name).write_bytes(path.read_bytes())
        try:
            return read(directory)
        finally:
            shutil.rmtree(directory)

    return run


def _lines(lines: Sequence[str], read: Read) -> Subject:
    return Subject(kind="result", suffix=".jsonl", content="\n".join([*lines, ""]).encode(), read=read)


def _models() -> list[Subject]:
    return [
        _json("model", {**CONFIGS["tiny"]}, by_command("estimate", "--model")),
        _json("model", {**CONFIGS["gpt2-xl"], "n_layer": 2}, by_command("estimate", "--json", "--model")),
        _json("model", {**CONFIGS["tiny"]}, in_directory("config.json", by_command("estimate", "--model"))),
    ]


def _configs() -> list[Subject]:
    """Each framework's configurations, an own recipe, and the files that single options name."""
    recipe = TrainingRecipe(model="tiny").to_json()
    deepspeed = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}, "fp16": {"enabled": True}}
    trained = ("estimate", "--engine", "deepspeed", "--zero", "3", "--precision", "mixed-fp16", "--model", "tiny")
    study = next(Path(__file__).resolve().parents[2].joinpath(STUDY).glob("*.toml"))
    operators = b"# kept\naten.mm.default\naten.addmm.default/2\n"
    return [
        *_framework_configs(),
        _json("config", recipe, by_command("estimate", "--json", "--config")),
        _json("config", TRAINER, by_command("estimate", "--model", "tiny", "--json", "--config")),
        _json("config", deepspeed, by_command(*trained, "--deepspeed-config")),
        _json("config", deepspeed, as_text(*trained, "--deepspeed-config")),
        _json("config", RULES, by_function(read_rules)),
        Subject(kind="config", suffix=".toml", content=study.read_bytes(), read=by_function(load_study)),
        Subject(
            kind="config",
            suffix=".txt",
            content=operators,
            read=by_command("estimate", "--model", "tiny", "--selective"),
        ),
        Subject(
            kind="config",
            suffix=".txt",
            content=b"# tokens of each expert\n40 30, 20 10 60 0 50 30  # of 8\n",
            read=by_command("estimate", "--model", "mixtral-8x7b", "--experts", "eager", "--routing"),
        ),
    ]


def _framework_configs() -> Iterator[Subject]:
    """The first two examples of each framework that are understood."""
    table = json.loads((DATA / "configs" / "sample.json").read_text(encoding="utf-8"))
    seen: Counter[str | None] = Counter()
    for row in table:
        framework = row.get("framework")
        path = DATA / "configs" / "files" / row["repository"].replace("/", "+") / row["path"]
        is_file = path.suffix in (".json", ".yaml", ".yml", ".toml")
        # others name files that are not copied here
        if (
            not is_file
            or b"deepspeed:" in path.read_bytes()
            or "error" in row
            or "options" in row
            or seen[framework] == _PER_FRAMEWORK
        ):
            continue
        seen[framework] += 1
        read = by_command("estimate", "--model", "tiny", "--config")
        content = path.read_bytes()
        if path.suffix == ".json":
            yield Subject(kind="config", suffix=".json", content=content, values=json.loads(content), read=read)
        elif path.suffix == ".toml":
            yield Subject(kind="config", suffix=".toml", content=content, read=read)
        else:
            yield Subject(
                kind="config",
                suffix=".yaml",
                content=content,
                values=yaml.safe_load(content),
                write=lambda values: yaml.safe_dump(values).encode(),
                read=read,
            )


def _lengths() -> list[Subject]:
    content = "".join(f"{12 + 7 * number % 50}\n" for number in range(40)).encode()
    judge = ("estimate", "--model", "tiny", "--gpu", "rtx4090", "--batch", "2", "--seq", "64", "--json", "--lengths")
    return [Subject(kind="lengths", suffix=".txt", content=content, read=by_command(*judge))]
