"""The environment: package versions and their supported ranges, GPUs of this machine, known GPUs."""

import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from ligerprof.gpus import GPUS, Vendor
from ligerprof.reports.terminal import bold, listing_table, stacked
from ligerprof.serialization import document, select
from ligerprof.units import format_bytes
from ligerprof.version import __version__

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from rich.console import RenderableType
    from rich.table import Table

PackageStatus = Literal["ok", "missing", "out of range"]
_GPU_NOTE = (
    "Figures that are not measured come from data sheets and public reports of torch's output; of nominal ones no"
    " report\nis known.\n"
    "--gpu 24GiB:sm89 is a GPU of that size and compute capability."
)
_STYLES: dict[PackageStatus, str] = {"ok": "green", "missing": "yellow", "out of range": "red"}
# extras for the development of ligerprof itself
_DEVELOPMENT_EXTRAS = ("test", "dev")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageState:
    """One package that ligerprof can use.

    Attributes:
        wanted: the supported versions, such as `>=2.11`.
        extra: the extra of ligerprof that installs it; None for a required package.
    """

    name: str
    installed: str | None
    wanted: str
    extra: str | None
    status: PackageStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuHere:
    """One CUDA device that torch detects.

    Attributes:
        memory_bytes: torch's `total_memory`.
        known_as: its name in the table of GPUs, or None.
    """

    index: int
    title: str
    memory_bytes: int
    sm_count: int
    compute_capability: tuple[int, int]
    known_as: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Everything `ligerprof env` prints.

    Attributes:
        packages: in the order of pyproject.toml; empty if ligerprof is not installed.
        cuda: the CUDA version of torch's build; None without a GPU and on AMD GPUs.
        no_gpu_reason: why torch detects no GPU, or None.
    """

    python: str
    system: str
    packages: tuple[PackageState, ...]
    cuda: str | None
    gpus: tuple[GpuHere, ...]
    no_gpu_reason: str | None


def read_environment() -> Environment:
    """Read package versions and, if torch can be imported, the GPUs."""
    reason = no_gpu_reason()
    cuda: str | None = None
    gpus: tuple[GpuHere, ...] = ()
    if reason is None:
        import torch

        cuda, gpus = torch.version.cuda, tuple(map(_gpu_here, range(torch.cuda.device_count())))
    return Environment(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages=tuple(_read_packages()),
        cuda=cuda,
        gpus=gpus,
        no_gpu_reason=reason,
    )


def _read_packages() -> Iterator[PackageState]:
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("ligerprof") or []
    except metadata.PackageNotFoundError:
        return
    for line in lines:
        requirement = Requirement(line)
        match = _EXTRA.search(str(requirement.marker or ""))
        extra = match.group(1) if match else None
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra or ""})
        if applies and extra not in _DEVELOPMENT_EXTRAS:
            yield _package_state(requirement, extra)


def _package_state(requirement: "Requirement", extra: str | None) -> PackageState:
    name, wanted = requirement.name, requirement.specifier
    installed: str | None = None
    status: PackageStatus = "missing"
    with suppress(metadata.PackageNotFoundError):
        installed = metadata.version(name)
        accepted = wanted.contains(installed, prereleases=True)
        status = "ok" if accepted else "out of range"
    return PackageState(name=name, installed=installed, wanted=str(wanted), extra=extra, status=status)


def no_gpu_reason() -> str | None:
    """Why torch cannot use a GPU on this machine, or None if it can."""
    try:
        import torch
    # OSError: torch's shared libraries fail to load
    except (ImportError, OSError) as error:
        return f"torch cannot be imported: {error}"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "torch finds no CUDA device or driver"


def _gpu_here(index: int) -> GpuHere:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return GpuHere(
        index=index,
        title=properties.name,
        memory_bytes=properties.total_memory,
        sm_count=properties.multi_processor_count,
        compute_capability=(properties.major, properties.minor),
        known_as=next((gpu.name for gpu in GPUS.values() if gpu.title == properties.name), None),
    )


def environment_json(environment: Environment) -> dict[str, Any]:
    """The object of `ligerprof env --json`."""
    figures = ("name", "title", "memory_bytes", "context_bytes", "kernels_bytes", "sm_count", "compute_capability")
    return document(
        "env",
        {"ligerprof": __version__},
        select(environment, "python", "system", "cuda", "packages", "gpus", "no_gpu_reason"),
        {
            "known_gpus": [
                select(gpu, *figures, "cublas_workspace_bytes", "measured", "nominal") for gpu in GPUS.values()
            ]
        },
    )


def render_environment(environment: Environment) -> "RenderableType":
    """Lay out the environment for a terminal, at most 100 columns wide."""
    heading = f"ligerprof {__version__}, Python {environment.python}, {environment.system}"
    return stacked(
        bold(heading),
        *_packages_part(environment),
        bold("GPUs of this machine"),
        *_gpu_lines(environment),
        bold("\nKnown GPUs, for --gpu"),
        _known_gpus_table(),
        _GPU_NOTE,
    )


def _packages_part(environment: Environment) -> "Iterator[RenderableType]":
    from rich.text import Text

    if not environment.packages:
        yield "\nligerprof runs from a source tree that is not installed; its requirements are unknown.\n"
        return
    rows = []
    for item in environment.packages:
        status = Text(item.status, style=_STYLES[item.status])
        rows.append((item.name, item.installed or "-", item.wanted, item.extra or "-", status))
    yield listing_table("package", "installed", "wanted", "extra", "state", rows=rows)
    extras = dict.fromkeys(item.extra for item in environment.packages if item.status == "missing")
    if names := ",".join(filter(None, extras)):
        yield f"To install missing packages: pip install -c constraints.txt -e '.[{names}]'\n"


def _gpu_lines(environment: Environment) -> Iterator[str]:
    for gpu in environment.gpus:
        known = f"--gpu {gpu.known_as}" if gpu.known_as else "not in the table below"
        capability = ".".join(map(str, gpu.compute_capability))
        memory = format_bytes(gpu.memory_bytes)
        yield f" {gpu.index}: {gpu.title}, {memory}, {gpu.sm_count} SMs, capability {capability}; {known}"
    if environment.no_gpu_reason is not None:
        yield f" none: {environment.no_gpu_reason}. Steps are simulated."


def _known_gpus_table() -> "Table":
    right = ("memory", "SMs")
    rows = [
        (
            gpu.name,
            gpu.title,
            format_bytes(gpu.memory_bytes),
            str(gpu.sm_count),
            "ROCm" if gpu.vendor is Vendor.AMD else "sm{}{}".format(*gpu.compute_capability),
            "yes" if gpu.measured else "nominal" if gpu.nominal else "no",
        )
        for gpu in GPUS.values()
    ]
    return listing_table("name", "GPU", *right, "arch", "measured", right=right, folded=("GPU",), rows=rows)
