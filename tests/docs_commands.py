"""The commands of the documentation, and a folder with the files that they name."""

import gzip
import lzma
import random
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from ligerprof.cli.main import main
from tests.paths import DATA, RECORDINGS, REPOSITORY, RESULTS

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
# a command with one of these comments is only checked for its options
NOT_RUN_MARKS = ("needs a GPU", "needs TRL", "needs torchtitan")
EXIT_MARK = re.compile(r"exit code (\d+)")
_FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
_ELIDED = ("...", "…")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A command of a page.

    Attributes:
        words: the command with its arguments, without what the shell reads.
        redirected: the file that its output goes to.
        output: the lines that the page shows below it; None if it shows none.
    """

    line: str
    words: tuple[str, ...]
    comment: str
    redirected: str | None = None
    output: tuple[str, ...] | None = None

    @property
    def needs_gpu(self) -> bool:
        return any(mark in self.comment for mark in NOT_RUN_MARKS)

    @property
    def exit_codes(self) -> tuple[int, ...]:
        """0, or 3 for a recipe that does not fit, unless the comment names another."""
        found = EXIT_MARK.search(self.comment)
        return (int(found[1]),) if found else (0, 3)


def fences(text: str) -> list[tuple[str, str]]:
    """Info string and content of each fenced block."""
    return [(match["kind"], match["body"]) for match in _FENCE.finditer(text)]


def shown_commands(text: str) -> list[Shown]:
    """The commands in the blocks `sh`, one per line, and `console`, after a dollar sign."""
    found = []
    for kind, body in fences(text):
        lines = body.replace("\\\n", " ").splitlines()
        if kind == "sh":
            found += [_shown(line, None) for line in lines if line.strip() and not line.startswith("#")]
        elif kind == "console":
            starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
            for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
                output = tuple(line.rstrip() for line in lines[start + 1 : end])
                found.append(_shown(lines[start][2:], output if any(output) else None))
    return found


def _shown(line: str, output: tuple[str, ...] | None) -> Shown:
    code, _, comment = line.partition("  #")
    words = shlex.split(code)
    # what runs only if the command fails
    words = words[: words.index("||")] if "||" in words else words
    redirected = words[words.index(">") + 1] if ">" in words else None
    words = words[: words.index(">")] if redirected else words
    return Shown(line=line, words=tuple(words), comment=comment, redirected=redirected, output=output)


def missing_lines(output: tuple[str, ...], printed: str) -> list[str]:
    """The lines of a page that a command does not print, or not in this order; an ellipsis matches any lines."""
    # as the page's own lines are read
    lines = iter([line.rstrip() for line in printed.replace("\\\n", " ").splitlines()])
    return [each for each in output if each and not each.strip().startswith(_ELIDED) and each not in lines]


def build_folder(folder: Path) -> None:
    """Write the files that the pages name: recordings, runs, configuration files, a trace and a program."""
    small, other = (
        lzma.decompress((RECORDINGS / f"small-{name}.pickle.xz").read_bytes()) for name in ("lora", "own-all")
    )
    for name in ("snapshot", "before", "main", "measured", "a"):
        (folder / f"{name}.pickle").write_bytes(small)
    for name in ("after", "branch", "b"):
        (folder / f"{name}.pickle").write_bytes(other)
    for name in ("snapshot", "before"):
        shutil.copy(RECORDINGS / "small-lora.pickle.xz", folder / f"{name}.pickle.xz")
    examples = REPOSITORY / "docs" / "examples"
    shutil.copytree(examples, folder / "docs" / "examples")
    # pages name some of them without their folder
    shutil.copytree(examples, folder, dirs_exist_ok=True)
    (folder / "snapshots").mkdir()
    for rank, content in enumerate((small, other)):
        (folder / "snapshots" / f"rank{rank}.pickle").write_bytes(content)
    (folder / "out").mkdir()
    (folder / "out" / "snapshot.pickle").write_bytes(small)
    recorded = (DATA / "traces" / "llama3.2-1b-step.pt.trace.json.xz").read_bytes()
    trace = gzip.compress(lzma.decompress(recorded), compresslevel=1)
    for name in ("step", "before", "after"):
        (folder / f"{name}.pt.trace.json.gz").write_bytes(trace)
    _write_runs(folder, trace)
    draw = random.Random(0)
    configs = {
        "chat-lengths.txt": "".join(f"{int(draw.lognormvariate(5.6, 0.9)) + 1}\n" for _ in range(40_000)),
        "train.py": "print('trained')\n",
        "my-study.toml": _study_example(),
    }
    for name, text in configs.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "my_package").mkdir()
    shutil.copy(folder / "train.py", folder / "my_package" / "train.py")
    figures = {"before.json": ["estimate"], "after.json": ["estimate", "--liger", "flce"]}
    figures["baseline.json"] = ["explain", str(folder / "before.pickle")]
    for name, words in figures.items():
        result = CliRunner().invoke(main, [*words, "--json"], catch_exceptions=False)
        (folder / name).write_text(result.stdout, encoding="utf-8")
    for name in ("tests", "benchmarks"):
        (folder / name).symlink_to(REPOSITORY / name)


def _study_example() -> str:
    page = (REPOSITORY / "docs" / "study.md").read_text(encoding="utf-8")
    return next(body for kind, body in fences(page) if kind == "toml")


def _write_runs(folder: Path, trace: bytes) -> None:
    """Simulated runs of a tiny model under the names of the pages, with a trace as a GPU writes it."""
    tiny = ["--model", "tiny", "--seq", "64", "--batch", "2", "--device", "simulated", "--force", "-o"]
    runs = folder / "runs"
    for name, more in (("001", []), ("002", ["--liger", "flce"])):
        result = CliRunner().invoke(main, ["step", *tiny, str(runs / name), *more], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        (runs / name / "tensorboard" / "step.pt.trace.json.gz").write_bytes(trace)
    shutil.copy(DATA / "live.json", runs / "001")
    for copy, original in (("none", "001"), ("flce", "002"), ("7", "001")):
        shutil.copytree(runs / original, runs / copy)
    for results in ("runs/sweep", "runs/study"):
        (folder / results).mkdir()
        shutil.copy(RESULTS / "study-h200.jsonl", folder / results / "results.jsonl")
    for name in ("h200.jsonl", "laptop.jsonl"):
        shutil.copy(RESULTS / "study-h200.jsonl", folder / name)
    for name in ("bench.jsonl", "other.jsonl"):
        shutil.copy(RESULTS / "kernels-h200.jsonl", folder / name)
