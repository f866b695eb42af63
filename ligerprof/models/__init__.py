"""The models that can be trained: architectures, the catalog of published models, and specs made from configs."""

from ligerprof.models.architectures import ARCHITECTURES
from ligerprof.models.catalog import CATALOG, CONFIGS, DEFAULT_MODEL, CatalogModel
from ligerprof.models.from_config import spec_from_config
from ligerprof.models.names import load_model
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
