import pytest
import torch

from ligerprof.models import spec_from_config
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.training import built_model
from tests.kernels.models import FAMILIES


@pytest.mark.parametrize("lora", [None, 4])
def test_the_first_of_each_group_of_layers_is_checkpointed(lora: int | None) -> None:
    config = {**FAMILIES["llama"], "model_type": "llama", "num_hidden_layers": 5}
    recipe = TrainingRecipe(model=spec_from_config(config, name="five"), checkpoint_every=2, lora=lora)
    with built_model(recipe, torch.device("cpu")) as model:
        layers = model.get_submodule("base_model.model.model.layers" if lora else "model.layers")
        assert [layer.gradient_checkpointing for layer in layers.children()] == [True, False, True, False, True]
