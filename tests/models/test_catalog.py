from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from ligerprof.models import ARCHITECTURES, CATALOG, CatalogModel, load_model, spec_from_config
from ligerprof.models.names import models_without_config, short_names
from tests.models.test_models import described_parameters, transformers_parameters
from tests.sampling import sampled

# as the hub shows them; tied weights once
PUBLISHED = {
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-xl": 1_557_611_200,
}
SMALLEST_OF_EACH_GROUP = {row.group: row for row in sorted(CATALOG, key=lambda row: -row.parameters)}.values()


def with_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    key = "n_layer" if "n_layer" in config else "num_hidden_layers"
    if "layer_types" not in config:
        return {**config, key: layers}
    kinds = config["layer_types"]
    return {**config, key: layers, "layer_types": [*dict.fromkeys(kinds), *kinds][:layers]}


def test_the_catalog_is_large_and_published() -> None:
    assert sum(bool(row.hub_ids) for row in CATALOG) >= 60
    assert {hub_id: load_model(hub_id).parameter_count for hub_id in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize("row", CATALOG, ids=lambda row: row.name)
def test_every_row_and_variant_has_the_published_number_of_parameters(row: CatalogModel) -> None:
    configs = [row.config, *row.hub_ids.values()]
    assert {spec_from_config(config, name=row.name).parameter_count for config in configs} == {row.parameters}


@sampled("row", SMALLEST_OF_EACH_GROUP, ids=lambda row: row.name, every=5)
def test_every_parameter_is_as_in_transformers(row: CatalogModel) -> None:
    # two layers show what each layer adds
    config = with_layers(row.config, 2)
    assert described_parameters(spec_from_config(config, name="two layers")) == transformers_parameters(config)


def test_no_name_means_two_models() -> None:
    names = Counter(
        name.casefold() for row in CATALOG for name in {row.name, *row.aliases, *(each for each in row.hub_ids)}
    )
    assert [name for name, count in names.items() if count > 1] == []
    assert set(models_without_config()).isdisjoint(names)
    # without the organization a mirror and its original have the same name, and the same figures
    last_parts: dict[str, Mapping[str, Any]] = {}
    for row in CATALOG:
        for hub_id, config in row.hub_ids.items():
            last = hub_id.rpartition("/")[2].casefold()
            assert last_parts.setdefault(last, config) == config
            assert short_names().get(last, ("", config))[1] == config


def test_rows_have_only_what_differs_from_their_group() -> None:
    assert {row.config["model_type"] for row in CATALOG} <= set(ARCHITECTURES)
    for row in CATALOG:
        for config in row.hub_ids.values():
            assert config.keys() == row.config.keys()
