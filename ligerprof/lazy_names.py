"""Names of a package that are imported when they are first used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        package: its name.
        homes: the module within the package that has each name; a module of that very name is the value itself.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(f"{package}.{homes[name]}")
        return home if homes[name] == name else getattr(home, name)

    return load
