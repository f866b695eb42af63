"""The models that can be trained: architectures, built-in models, and specs made from configs."""

from ligerprof.models.architectures import ARCHITECTURES
from ligerprof.models.catalog import CONFIGS, DEFAULT_MODEL, load_model
from ligerprof.models.from_config import spec_from_config
from ligerprof.models.spec import ModelSpec, ParameterShape

__all__ = [
    "ARCHITECTURES",
    "CONFIGS",
    "DEFAULT_MODEL",
    "ModelSpec",
    "ParameterShape",
    "load_model",
    "spec_from_config",
]
