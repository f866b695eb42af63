"""Call functions when a module has been imported; uses the standard library alone, since every process loads it."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class _AfterImport(MetaPathFinder):
    """Finds the modules with actions through the other finders, and runs the actions after the module's code."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that another finder gives, with a loader that runs the actions; None for all other modules."""
        if fullname not in self.actions:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    wrapped: Any = _Loader(spec.loader, self.run)
                    spec.loader = wrapped
                return spec
        return None

    def run(self, module: ModuleType) -> None:
        for action in self.actions.pop(module.__name__, ()):
            action(module)


class _Loader:
    """A loader that calls a function after the module's code; otherwise, it is the loader that it wraps."""

    def __init__(self, loader: Any, then: Action) -> None:
        self._loader, self._then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)


_FINDER = _AfterImport()


def after_import(name: str, action: Action) -> None:
    """Call `action` once with a module that is not imported yet, after its code has run."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.actions.setdefault(name, []).append(action)


def after_import_or_now(name: str, action: Action) -> None:
    """Call `action` with a module, now if it is imported, else after its code has run."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        after_import(name, action)


def forget(name: str, action: Action) -> None:
    """Withdraw an action."""
    waiting = _FINDER.actions.get(name, [])
    if action in waiting:
        waiting.remove(action)
    if not waiting:
        _FINDER.actions.pop(name, None)
