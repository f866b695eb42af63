"""The versions that a result names, because its bytes depend on them."""

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("torch", "triton", "transformers", "peft", "liger_kernel", "deepspeed")


def package_versions() -> dict[str, str]:
    """Python's version and that of each package a step may run; absent ones are left out."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
