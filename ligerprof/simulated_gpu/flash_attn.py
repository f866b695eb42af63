"""flash-attn 2.8 where it is not installed: its functions make and keep its tensors, and compute nothing.

Its package cannot be built without CUDA's compiler. Sizes and their order are those of csrc/flash_attn/flash_api.cpp
and flash_attn/flash_attn_interface.py of version 2.8.3; they have not been compared with a GPU. Left out: the parts of
keys that are split over several blocks, for few queries and many keys, and caches for decoding.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

PACKAGE, DISTRIBUTION, VERSION = "flash_attn", "flash-attn", "2.8.3"
_MODULES = (PACKAGE, f"{PACKAGE}.flash_attn_interface", f"{PACKAGE}.bert_padding")


class _Metadata(Distribution):
    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {VERSION}\n",
            "top_level.txt": f"{PACKAGE}\n",
        }
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


class FlashAttnFinder(MetaPathFinder, Loader):
    """Finds the package and its metadata behind all others."""

    def find_spec(self, fullname: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=fullname == PACKAGE) if fullname in _MODULES else None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> list[Distribution]:
        name = None if context is None else context.name
        return [_Metadata()] if name is None or name.replace("_", "-").lower() == DISTRIBUTION else []

    def create_module(self, _spec: ModuleSpec) -> None:
        """Let Python make it."""

    def exec_module(self, module: ModuleType) -> None:
        from ligerprof.simulated_gpu import flash_functions

        vars(module).update({name: getattr(flash_functions, name) for name in flash_functions.NAMES})
        module.__version__ = VERSION  # type: ignore[attr-defined]


def stand_in() -> None:
    """Let this process find the package where it is not installed."""
    sys.meta_path.append(FlashAttnFinder())


def used_stand_ins() -> list[str]:
    """What the program has imported of it, as its name and version."""
    module = sys.modules.get(PACKAGE)
    spec = None if module is None else module.__spec__
    return [f"{DISTRIBUTION} {VERSION}"] if spec is not None and isinstance(spec.loader, FlashAttnFinder) else []
