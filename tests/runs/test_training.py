"""The batches that a step trains on, and the model that it calls."""

from typing import Any

import pytest
import torch

from ligerprof.analyzers.estimate.static import input_sizes
from ligerprof.errors import RecipeError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.training import built_model, make_batch, make_trainer, train_step
from tests.runs.phases import NoPhases
from tests.traced_models import recipe_of


def batch_of(**options: object) -> dict[str, torch.Tensor]:
    recipe = TrainingRecipe(model="tiny", **options)  # type: ignore[arg-type]
    return make_batch(recipe, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "below"),
    [
        ("BertForSequenceClassification", (3,), torch.int64, 2),
        ("LlamaForSequenceClassification", (3,), torch.float32, 1),
        ("RobertaForTokenClassification", (3, 16), torch.int64, 9),
        ("BertForMaskedLM", (3, 16), torch.int64, 3000),
    ],
)
def test_labels_are_what_the_class_that_a_config_names_takes(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, below: int
) -> None:
    recipe = recipe_of(name, batch=3, seq=16, padding=0.25)
    batch = make_batch(recipe, torch.device("cpu"))
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    labels = batch["labels"]
    assert (labels.shape, labels.dtype) == (shape, dtype)
    assert 0 <= labels.min() <= labels.max() < below
    with built_model(recipe, torch.device("cpu")) as model:
        assert type(model).__name__ == name
        trainer = make_trainer(recipe, model, "cpu")
        trainer.backward(trainer.forward(batch))
    assert sum(input_sizes(recipe)) == sum(tensor.nbytes for tensor in batch.values())


def test_a_classifier_takes_no_losses_of_language_models() -> None:
    for options in ({"loss": "chunked-nll"}, {"packing": True}):
        with pytest.raises(RecipeError, match=r"^BertForMaskedLM, whose class ends in ForMaskedLM, takes no kernels"):
            recipe_of("BertForMaskedLM", batch=3, seq=16, **options)


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


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_compiled_step_runs_one_graph_of_the_whole_model(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[int] = []
    losses: dict[bool, list[float]] = {}

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compiler(model, backend=backend))
    for compiles in (False, True):
        options: dict[str, Any] = {"checkpointing": checkpointing, "compile": compiles, "optimizer": "sgd"}
        recipe = TrainingRecipe(model="tiny", batch=1, seq=8, precision="fp32", **options)
        torch._dynamo.reset()
        torch.manual_seed(0)
        with built_model(recipe, torch.device("cpu")) as model:
            trainer, batch = make_trainer(recipe, model, "cpu"), make_batch(recipe, torch.device("cpu"))
            observer = NoPhases()
            for _ in range(2):
                train_step(trainer, batch, observer)
            losses[compiles] = observer.losses

    assert len(graphs) == 1
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    assert losses[True][1] != losses[True][0]
