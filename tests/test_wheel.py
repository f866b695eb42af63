"""The wheel and the sdist: what they contain, and that the wheel's commands run where no extra is installed."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.paths import DATA, RECORDINGS, REPOSITORY

EXTRAS = ("deepspeed", "tensorboard", "torch_tb_profiler", "peft", "bitsandbytes", "liger_kernel", "cut_cross_entropy")
SMALL, OTHER = (str(RECORDINGS / f"{name}.pickle.xz") for name in ("small-lora", "small-own-all"))
TRACE = str(DATA / "traces" / "llama3.2-1b-step.pt.trace.json.xz")
RUNS = {
    "step": ["--model", "tiny", "--device", "simulated", "-o", "run"],
    "explain": ["run"],
    "estimate": ["--gpu", "h200"],
    "advise": ["--model", "tiny", "--memory-limit", "100MiB", "--no-simulate"],
    "compare": ["run", SMALL],
    "diff": [SMALL, OTHER],
    "plot": [SMALL, "-o", "figures"],
    "trace": [TRACE],
    "models": [],
    "kernels": [],
    "env": [],
}
PROGRAM = """
import json, sys
EXTRAS, runs = json.loads(sys.argv[1]), json.loads(sys.argv[2])
class WithoutExtras:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in EXTRAS else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(WithoutExtras, sys.meta_path)
import ligerprof
from click.testing import CliRunner
from ligerprof.cli.main import COMMANDS, main
found = {}
for name in COMMANDS:
    result = CliRunner().invoke(main, [name, *runs.get(name, ["--help"])])
    found[name] = [result.exit_code, result.output[-2000:] + (repr(result.exception) if result.exit_code else "")]
view = CliRunner().invoke(main, ["view", "run"])
print(json.dumps([ligerprof.__file__, found, [view.exit_code, view.stderr]]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    pytest.importorskip("hatchling", reason="the package is built with hatchling")
    folder = tmp_path_factory.mktemp("built")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=REPOSITORY, check=True, timeout=120
    )
    return folder


def test_every_command_of_the_wheel_runs_without_extras(built: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    zipfile.ZipFile(next(built.glob("*.whl"))).extractall(package)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(EXTRAS), json.dumps(RUNS)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(package)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=500,
    )
    origin, found, (view_code, view_error) = json.loads(done.stdout.splitlines()[-1])

    assert Path(origin).is_relative_to(package)
    assert {name: output for name, (code, output) in found.items() if code} == {}
    # a missing package is one line
    assert view_code == 1
    assert len(view_error.strip().splitlines()) == 1
    assert "pip install" in view_error


def test_the_wheel_and_the_sdist_contain_the_package_and_its_licences(built: Path) -> None:
    wheel = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files", "ligerprof"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    ).stdout.split()

    assert {"ligerprof.pth", *tracked} <= wheel
    assert {"README.md", "CHANGELOG.md", "CITATION.cff", "constraints.txt", "ligerprof.pth", *tracked} <= sources
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in wheel)
    assert sum(name.rpartition("/")[2] in ("LICENSE", "LICENSES.txt") for name in wheel) >= 2
