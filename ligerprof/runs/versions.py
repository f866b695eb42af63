"""The package versions that a result depends on."""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version


def package_versions() -> dict[str, str]:
    """The versions of Python and of each installed package that a step may run."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "peft", "liger_kernel", "deepspeed"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
