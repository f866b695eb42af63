"""The models that can be trained: architectures, the catalog of published models, and specs made from configs.

Each name is loaded on first use, so that reading a recording does not load the catalog.
"""

from typing import TYPE_CHECKING

from ligerprof.lazy_names import lazy_names

if TYPE_CHECKING:
    from ligerprof.models.architectures import ARCHITECTURES
    from ligerprof.models.from_config import spec_from_config
    from ligerprof.models.names import CATALOG, CONFIGS, DEFAULT_MODEL, CatalogModel, load_model
    from ligerprof.models.spec import ModelSpec, ParameterShape

__all__ = [
    "ARCHITECTURES",
    "CATALOG",
    "CONFIGS",
    "DEFAULT_MODEL",
    "CatalogModel",
    "ModelSpec",
    "ParameterShape",
    "load_model",
    "spec_from_config",
]

_HOMES = {
    "ARCHITECTURES": "architectures",
    "CATALOG": "names",
    "CONFIGS": "names",
    "DEFAULT_MODEL": "names",
    "CatalogModel": "names",
    "ModelSpec": "spec",
    "ParameterShape": "spec",
    "load_model": "names",
    "spec_from_config": "from_config",
}

__getattr__ = lazy_names(__name__, _HOMES)
