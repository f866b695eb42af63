"""Tapes of decoder layers are what transformers' code does now."""

from importlib.metadata import version

import pytest
from packaging.version import Version

from benchmarks.layer_recorder import SmallModel
from benchmarks.layer_tapes import configs_of
from ligerprof.models import spec_from_config
from ligerprof.models.layer_tape import layer_kind, layer_tape, norm_tape

pytestmark = [
    pytest.mark.usefixtures("no_log_records"),
    pytest.mark.skipif(Version(version("transformers")) < Version("5.23"), reason="the version that was recorded"),
]


@pytest.mark.parametrize("model_type", ["llama", "phi3", "stablelm", "deepseek_v2"])
def test_a_layer_is_recorded_again(model_type: str) -> None:
    spec = spec_from_config(next(configs_of(model_type)), name=model_type)
    model = SmallModel(spec)
    kinds = {str(layer_kind(spec, index)): index for index in range(spec.layers)}
    for index in kinds.values():
        assert model.record(index) == layer_tape(spec, index)


def test_a_norm_is_recorded_again() -> None:
    spec = spec_from_config(next(configs_of("gemma")), name="gemma")
    assert SmallModel(spec).record_norm() == norm_tape(spec)
