"""What frameworks call packing: which keys are --packing, which change nothing, and which are refused."""

from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import UnsupportedError
from ligerprof.recipe.configs.resolve import load_options
from tests.recipe.configs.texts import read

TRL = {"max_length": 256, "model_name_or_path": "tiny", "dataset_name": "d", "loss_type": "nll"}
TRL_TWO = {**TRL, "per_device_train_batch_size": 2}
AXOLOTL = {"base_model": "tiny", "datasets": [], "micro_batch_size": 2, "sequence_len": 256}
FACTORY = {"model_name_or_path": "tiny", "stage": "sft", "finetuning_type": "full", "cutoff_len": 256}


@pytest.mark.parametrize(
    ("keys", "packs"),
    [
        (TRL_TWO, False),
        ({**TRL_TWO, "packing": True}, True),
        ({**TRL, "packing": True, "per_device_train_batch_size": 1}, True),
        ({**TRL_TWO, "packing": True, "packing_strategy": "bfd_split"}, True),
        ({**TRL_TWO, "packing": True, "packing_strategy": "wrapped"}, False),
        ({**TRL_TWO, "packing": True, "packing_strategy": "wrapped", "padding_free": True}, True),
        ({**TRL_TWO, "padding_free": True}, True),
        ({**TRL, "padding_free": True, "per_device_train_batch_size": 1}, False),
        ({**TRL_TWO, "padding_free": False}, False),
        ({**AXOLOTL, "sample_packing": True, "flash_attention": True}, True),
        ({**AXOLOTL, "sample_packing": False}, False),
        # no attention is set: documents see each other
        ({**AXOLOTL, "sample_packing": True}, False),
        # one row alone is the same as one packed row
        ({**AXOLOTL, "micro_batch_size": 1, "sample_packing": True, "eager_attention": True}, True),
        (
            {
                **AXOLOTL,
                "base_model": "mistralai/Mistral-7B-v0.1",
                "micro_batch_size": 1,
                "sample_packing": True,
                "sdp_attention": True,
            },
            True,
        ),
        ({**AXOLOTL, "batch_flattening": True, "flash_attention": True}, True),
        ({**FACTORY, "packing": True}, False),
        ({**FACTORY, "neat_packing": True, "flash_attn": "fa2"}, True),
    ],
)
def test_keys_that_pack(keys: dict[str, Any], packs: bool, tmp_path: Path) -> None:
    recipe, _ = read(tmp_path, keys)
    assert recipe.packing is packs


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({**AXOLOTL, "sample_packing": True, "sdp_attention": True}, "sample_packing: packing with torch's varlen"),
        (
            {**AXOLOTL, "sample_packing": True, "eager_attention": True},
            "sample_packing: packing of several rows without flash attention",
        ),
        (
            {**AXOLOTL, "sample_packing": True, "sdp_attention": True, "sdpa_varlen": False},
            "sample_packing: packing of several rows without flash attention",
        ),
        ({**FACTORY, "neat_packing": True}, "neat_packing: packing without flash attention"),
    ],
)
def test_rows_with_a_mask_of_their_own_are_refused(keys: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=says):
        read(tmp_path, keys)


def test_packed_rows_without_an_attention_have_a_mask_of_padding(tmp_path: Path) -> None:
    recipe, report = read(tmp_path, {**AXOLOTL, "sample_packing": True})
    assert (recipe.batch, recipe.packing, recipe.attention.value) == (2, False, "sdpa")
    assert recipe.padding == 0.01
    assert any("documents see each other" in sentence for sentence in report.assumed)


def test_the_command_line_wins(tmp_path: Path) -> None:
    read(tmp_path, {**TRL_TWO, "packing": True})
    source = str(next(tmp_path.iterdir()))
    options, _ = load_options([source], {"packing": False})
    assert options["packing"] is False
