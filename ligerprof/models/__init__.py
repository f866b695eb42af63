"""What is trained."""

from ligerprof.models.catalog import CONFIGS, DEFAULT_MODEL, load_model
from ligerprof.models.families import FAMILIES, spec_from_config
from ligerprof.models.spec import ModelSpec, ParameterShape

__all__ = ["CONFIGS", "DEFAULT_MODEL", "FAMILIES", "ModelSpec", "ParameterShape", "load_model", "spec_from_config"]
