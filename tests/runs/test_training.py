"""The batches that a step trains on."""

import pytest
import torch

from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.training import make_batch


def batch_of(**options: object) -> dict[str, torch.Tensor]:
    recipe = TrainingRecipe(model="tiny", **options)  # type: ignore[arg-type]
    return make_batch(recipe, torch.device("cpu"))


@pytest.mark.parametrize(("batch", "seq"), [(3, 8), (2, 5), (1, 9)])
def test_a_packed_batch_is_what_transformers_collator_makes(batch: int, seq: int) -> None:
    from transformers import DataCollatorWithFlattening

    made = batch_of(batch=batch, seq=seq, packing=True)
    assert made["input_ids"].shape == (1, batch * seq)
    starts = [int(start) for start in (made["position_ids"][0] == 0).nonzero()]
    documents = made["input_ids"][0].tensor_split(starts[1:])
    collated = DataCollatorWithFlattening()([{"input_ids": document.tolist()} for document in documents])
    assert len(documents) == max(batch, 2)
    assert {name: tensor.tolist() for name, tensor in made.items()} == {
        name: tensor.tolist() for name, tensor in collated.items()
    }


def test_a_model_masks_the_other_documents_of_a_packed_row() -> None:
    from transformers import LlamaConfig
    from transformers.masking_utils import create_causal_mask

    made = batch_of(batch=2, seq=3, packing=True)
    mask = create_causal_mask(
        config=LlamaConfig(attn_implementation="sdpa"),
        inputs_embeds=torch.zeros(1, 6, 8),
        attention_mask=None,
        past_key_values=None,
        position_ids=made["position_ids"],
    )
    assert isinstance(mask, torch.Tensor)
    assert mask[0, 0].equal(torch.block_diag(*[torch.ones(3, 3).tril()] * 2).bool())


def test_one_token_is_one_document() -> None:
    assert batch_of(batch=1, seq=1, packing=True)["position_ids"].tolist() == [[0]]
