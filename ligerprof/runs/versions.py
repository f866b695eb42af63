"""The package versions that a result depends on."""

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("torch", "triton", "transformers", "peft", "liger_kernel", "deepspeed")


def package_versions() -> dict[str, str]:
    """The versions of Python and of each package that a step may run; missing packages are left out."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
