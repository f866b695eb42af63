"""Files of a wrong kind: the error says what the file is and which command reads it."""

import gzip
import json
import lzma
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from ligerprof.cli.main import main
from ligerprof.cli.signpost import InputKind, kind_of
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.bench.records import Finding, write_lines
from tests.cli.test_bench import ENVIRONMENT, example_records
from tests.paths import DATA, RECORDINGS

SMALL = RECORDINGS / "small-lora.pickle.xz"
TRACE = DATA / "traces" / "llama3.2-1b-step.pt.trace.json.xz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and folders of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    snapshot, trace = lzma.decompress(SMALL.read_bytes()), lzma.decompress(TRACE.read_bytes())
    (folder / "snapshot.pickle").write_bytes(snapshot)
    (folder / "snapshot.gz").write_bytes(gzip.compress(snapshot, 1))
    (folder / "trace.json").write_bytes(trace[:500_000])
    shutil.copy(TRACE, folder / "trace.xz")
    for name in ("runs/001", "runs/002"):
        (folder / name).mkdir(parents=True)
        (folder / name / "snapshot.pickle").write_bytes(snapshot)
    for name, arguments in (("peak", ["explain", str(SMALL)]), ("estimate", ["estimate", "--model", "tiny"])):
        (folder / f"{name}.json").write_text(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    (folder / "recipe.json").write_text(json.dumps(TrainingRecipe(model="tiny").to_json(), indent=2))
    (folder / "sweep").mkdir()
    (folder / "sweep" / "results.jsonl").write_text('{"schema": 1, "kind": "cell", "key": "1"}\n')
    findings = (Finding(record=record, environment=ENVIRONMENT) for record in example_records())
    (folder / "bench.jsonl").write_text(write_lines(findings))
    (folder / "fit.json").write_text('{\n  "schema": 1,\n  "kind": "fit"\n}')
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    (folder / "args.json").write_text('{"per_device_train_batch_size": 4}')
    (folder / "page.html").write_text("<!doctype html><title>peak</title>")
    # these only start as a page and as weights do
    (folder / "merge.yaml").write_text("<<: *base\n")
    (folder / "anchor.yaml").write_text("k0: &z0 {}\n")
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0" + b'{"weight": 1}   ')
    (folder / "checkpoint.pt").write_bytes(b"PK\x03\x04 archive/data.pkl")
    (folder / "nothing").write_bytes(b"")
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("snapshot.pickle", InputKind.SNAPSHOT),
        ("snapshot.gz", InputKind.SNAPSHOT),
        ("trace.json", InputKind.TRACE),
        ("trace.xz", InputKind.TRACE),
        ("runs/001", InputKind.RUN),
        ("sweep", InputKind.SWEEP),
        ("sweep/results.jsonl", InputKind.CELLS),
        ("peak.json", InputKind.PEAK),
        ("estimate.json", InputKind.ESTIMATE),
        ("recipe.json", InputKind.RECIPE),
        ("bench.jsonl", InputKind.BENCH),
        ("fit.json", InputKind.OUTPUT),
        ("model", InputKind.MODEL),
        ("args.json", InputKind.TRAINING),
        ("page.html", InputKind.PAGE),
        ("merge.yaml", None),
        ("anchor.yaml", None),
        ("model.safetensors", InputKind.WEIGHTS),
        ("checkpoint.pt", InputKind.WEIGHTS),
        ("nothing", InputKind.EMPTY),
        ("empty", None),
        ("absent", None),
    ],
)
def test_a_kind_is_recognized(folder: Path, name: str, kind: InputKind | None) -> None:
    assert kind_of(folder / name) is kind


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("explain trace.json", "`ligerprof trace trace.json`"),
        ("explain trace.xz", "`ligerprof trace trace.xz`"),
        ("explain estimate.json", "`ligerprof compare estimate.json OTHER`"),
        ("explain peak.json", "`ligerprof diff peak.json OTHER`"),
        ("explain recipe.json", "`ligerprof estimate --config recipe.json`"),
        ("explain model", "`ligerprof estimate --model model`"),
        ("explain sweep", "`ligerprof plot sweep`"),
        ("explain checkpoint.pt", "`ligerprof run -- COMMAND`"),
        ("explain model.safetensors", "weights"),
        ("explain page.html", "a page for a browser"),
        ("explain nothing", "this is empty"),
        ("trace snapshot.pickle", "`ligerprof explain snapshot.pickle`"),
        ("trace snapshot.gz", "`ligerprof explain snapshot.gz`"),
        ("trace sweep", "`ligerprof plot sweep`"),
        ("trace runs", "a folder of 2 runs, such as runs/001. Give one of them."),
        ("compare runs", "a folder of 2 runs, such as runs/001. Give one of them."),
        ("compare snapshot.pickle trace.json", "`ligerprof trace trace.json`"),
        ("compare sweep/results.jsonl", "`ligerprof plot sweep/results.jsonl`"),
        ("compare fit.json", "the output of another command"),
        ("diff snapshot.pickle trace.json", "`ligerprof trace trace.json`"),
        ("diff snapshot.pickle runs", "a folder of 2 runs"),
        ("plot trace.json", "`ligerprof trace trace.json`"),
        ("plot recipe.json", "`ligerprof estimate --config recipe.json`"),
        ("plot runs", "a folder of 2 runs"),
        ("bench --from estimate.json", "`ligerprof compare estimate.json OTHER`"),
        ("estimate --config trace.json", "`ligerprof trace trace.json`"),
        ("estimate --model snapshot.pickle", "`ligerprof explain snapshot.pickle`"),
        ("estimate --model trace.json", "`ligerprof trace trace.json`"),
        ("kernels --model trace.json", "`ligerprof trace trace.json`"),
        ("explain snapshot.pickle --rules trace.json", "`ligerprof trace trace.json`"),
        ("view trace.json", "`ligerprof trace trace.json`"),
    ],
)
def test_a_command_names_the_one_that_reads_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, says: str
) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(main, command.split())

    assert result.exit_code in (1, 2)
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_file_to_write_has_no_signpost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(main, ["explain", "snapshot.pickle", "--html", "page.html"])

    assert (result.exit_code, result.stderr) == (1, "Error: page.html: exists. Add --force to overwrite it.\n")
