import io
import json
import platform
import sys
from importlib import metadata

import pytest
from click.testing import CliRunner

from ligerprof.cli.main import main
from ligerprof.gpus import GPUS
from ligerprof.reports import env
from ligerprof.reports.env import Environment, GpuHere, PackageState, read_environment, render_environment
from ligerprof.reports.terminal import PLAIN_WIDTH, console


def printed(environment: Environment) -> str:
    buffer = io.StringIO()
    console(buffer).print(render_environment(environment))
    return buffer.getvalue()


def make_environment(**changes: object) -> Environment:
    parts: dict[str, object] = {
        "python": "3.11.7",
        "system": "Linux x86_64",
        "packages": (
            PackageState(name="torch", installed="2.13.0+cpu", wanted=">=2.11", extra=None, status="ok"),
            PackageState(name="deepspeed", installed=None, wanted=">=0.19", extra="deepspeed", status="missing"),
            PackageState(name="peft", installed="0.1.0", wanted=">=0.18", extra="peft", status="out of range"),
            PackageState(name="liger-kernel", installed=None, wanted=">=0.8.5", extra="peers", status="missing"),
            PackageState(name="cut-cross-entropy", installed=None, wanted=">=25", extra="peers", status="missing"),
        ),
        "cuda": None,
        "gpus": (),
        "no_gpu_reason": "torch 2.13.0+cpu is built without CUDA",
    }
    return Environment(**{**parts, **changes})  # type: ignore[arg-type]


def test_versions_are_those_of_the_installed_packages() -> None:
    environment = read_environment()
    assert environment.python == platform.python_version()
    packages = {package.name: package for package in environment.packages}
    for name in ("click", "torch", "transformers"):
        assert (packages[name].installed, packages[name].status) == (metadata.version(name), "ok")
    # packages of the development extras are not listed
    assert not {"pytest", "mypy"} & set(packages)
    assert {packages[name].extra for name in ("deepspeed", "tensorboard", "torch-tb-profiler", "peft")} == {
        "deepspeed",
        "tensorboard",
        "peft",
    }


def test_every_optional_package_names_an_extra_that_exists() -> None:
    extras = set(metadata.metadata("ligerprof").get_all("Provides-Extra") or ())
    assert {package.extra for package in read_environment().packages} - {None} < extras


@pytest.mark.parametrize(
    ("installed", "status"),
    [
        ("2.10.1", "out of range"),
        ("2.11.0", "ok"),
        ("2.13.0+cu130", "ok"),
        ("2.15.0.dev20260901", "ok"),
        (None, "missing"),
    ],
)
def test_a_version_is_compared_with_the_range(
    installed: str | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(env.metadata, "version", version)
    torch = next(package for package in read_environment().packages if package.name == "torch")
    assert (torch.installed, torch.status) == (installed, status)


def test_missing_packages_come_with_the_command_that_installs_them() -> None:
    assert "pip install -c constraints.txt -e '.[deepspeed,peers]'" in printed(make_environment())


def test_without_a_gpu_the_reason_is_given() -> None:
    assert "none: torch 2.13.0+cpu is built without CUDA. Steps are simulated." in printed(make_environment())


def test_a_gpu_is_listed_with_its_name_for_the_gpu_option() -> None:
    here = GpuHere(
        index=0,
        title="NVIDIA H200",
        memory_bytes=GPUS["h200"].memory_bytes,
        sm_count=132,
        compute_capability=(9, 0),
        known_as="h200",
    )
    text = printed(make_environment(gpus=(here,), no_gpu_reason=None, cuda="12.9"))
    assert "0: NVIDIA H200, 139.80 GiB, 132 SMs, capability 9.0; --gpu h200" in text
    assert "none:" not in text


def test_an_uninstalled_source_tree_is_reported() -> None:
    assert "source tree that is not installed" in printed(make_environment(packages=()))


def test_a_torch_that_fails_to_import_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules makes the import fail, as a missing package would
    monkeypatch.setitem(sys.modules, "torch", None)
    assert (read_environment().no_gpu_reason or "").startswith("torch cannot be imported")


def test_output_fits_the_page_and_lists_every_gpu() -> None:
    result = CliRunner().invoke(main, ["env"])
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= PLAIN_WIDTH
    # the longest title is folded before its last word
    titles = {name: gpu.title if len(gpu.title) < 40 else gpu.title.rpartition(" ")[0] for name, gpu in GPUS.items()}
    assert all(f" {name} " in result.stdout and title in result.stdout for name, title in titles.items())


def test_json_marks_measured_gpus() -> None:
    result = CliRunner().invoke(main, ["env", "--json"])
    known = {gpu["name"]: gpu for gpu in json.loads(result.stdout)["known_gpus"]}
    assert known["h200"]["measured"] is True
    assert known["mi300x"]["measured"] is False
    assert {name: gpu["memory_bytes"] for name, gpu in known.items()} == {
        name: gpu.memory_bytes for name, gpu in GPUS.items()
    }
