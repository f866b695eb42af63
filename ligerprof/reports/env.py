"""The environment: package versions and their supported ranges, GPUs of this machine, known GPUs."""

import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from ligerprof import __version__
from ligerprof.gpus import GPUS, GpuSpec
from ligerprof.reports.listing import add_listing_row, listing_table
from ligerprof.serialization import document, select
from ligerprof.units import format_bytes

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from rich.console import RenderableType
    from rich.table import Table

PackageStatus = Literal["ok", "missing", "out of range"]
_STYLES: dict[PackageStatus, str] = {"ok": "green", "missing": "yellow", "out of range": "red"}
# extras for the development of ligerprof itself
_DEVELOPMENT_EXTRAS = ("test", "dev")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageState:
    """One package that ligerprof can use.

    Attributes:
        installed: the installed version, or None.
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
    return Environment(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages=tuple(_read_packages()),
        cuda=_cuda_version() if reason is None else None,
        gpus=_read_gpus() if reason is None else (),
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
    installed = _installed_version(requirement.name)
    status: PackageStatus = "missing"
    if installed is not None:
        status = "ok" if requirement.specifier.contains(installed, prereleases=True) else "out of range"
    return PackageState(
        name=requirement.name, installed=installed, wanted=str(requirement.specifier), extra=extra, status=status
    )


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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


def _read_gpus() -> tuple[GpuHere, ...]:
    import torch

    return tuple(_gpu_here(index) for index in range(torch.cuda.device_count()))


def _cuda_version() -> str | None:
    import torch

    return torch.version.cuda


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
    return document(
        "env",
        {"ligerprof": __version__},
        select(environment, "python", "system", "cuda", "packages", "gpus", "no_gpu_reason"),
        {"known_gpus": [_known_gpu_json(gpu) for gpu in GPUS.values()]},
    )


def _known_gpu_json(gpu: GpuSpec) -> dict[str, Any]:
    return select(
        gpu,
        *("name", "title", "memory_bytes", "context_bytes", "sm_count", "compute_capability"),
        *("cublas_workspace_bytes", "measured"),
    )


def render_environment(environment: Environment) -> "RenderableType":
    """Lay out the environment for a terminal, at most 100 columns wide."""
    from rich.console import Group
    from rich.text import Text

    heading = f"ligerprof {__version__}, Python {environment.python}, {environment.system}"
    return Group(
        Text(heading, style="bold"),
        *_packages_part(environment),
        Text("GPUs of this machine", style="bold"),
        *_gpu_lines(environment),
        Text("\nKnown GPUs, for --gpu", style="bold"),
        _known_gpus_table(),
        Text("Figures that are not measured come from data sheets and public reports of torch's output."),
    )


def _packages_part(environment: Environment) -> "Iterator[RenderableType]":
    from rich.text import Text

    if not environment.packages:
        yield Text("\nligerprof runs from a source tree that is not installed; its requirements are unknown.\n")
        return
    table = listing_table("package", "installed", "wanted", "extra", "state")
    for package in environment.packages:
        state = Text(package.status, style=_STYLES[package.status])
        add_listing_row(table, package.name, package.installed or "-", package.wanted, package.extra or "-", state)
    yield table
    extras = dict.fromkeys(package.extra for package in environment.packages if package.status == "missing")
    names = ",".join(extra for extra in extras if extra is not None)
    if names:
        yield Text(f"To install missing packages: pip install -c constraints.txt -e '.[{names}]'\n")


def _gpu_lines(environment: Environment) -> "Iterator[RenderableType]":
    from rich.text import Text

    for gpu in environment.gpus:
        known = f"--gpu {gpu.known_as}" if gpu.known_as else "not in the table below"
        capability = ".".join(map(str, gpu.compute_capability))
        memory = format_bytes(gpu.memory_bytes)
        yield Text(f" {gpu.index}: {gpu.title}, {memory}, {gpu.sm_count} SMs, capability {capability}; {known}")
    if environment.no_gpu_reason is not None:
        yield Text(f" none: {environment.no_gpu_reason}. Steps are simulated.")


def _known_gpus_table() -> "Table":
    table = listing_table(
        "name", "GPU", "memory", "SMs", "capability", "BLAS workspace", "measured", right=("memory", "SMs")
    )
    for gpu in GPUS.values():
        add_listing_row(
            table,
            gpu.name,
            gpu.title,
            format_bytes(gpu.memory_bytes),
            str(gpu.sm_count),
            ".".join(map(str, gpu.compute_capability)),
            format_bytes(gpu.cublas_workspace_bytes),
            "yes" if gpu.measured else "no",
        )
    return table
