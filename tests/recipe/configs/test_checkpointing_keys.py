"""What files say about checkpointing: which layers, and which outputs stay."""

from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import RecipeError, UnsupportedError
from ligerprof.recipe.training import TrainingRecipe
from tests.recipe.configs.texts import read

AXOLOTL = {
    "base_model": "NousResearch/Llama-3.2-1B",
    "micro_batch_size": 2,
    "sequence_len": 512,
    "gradient_checkpointing": True,
}
TRAINER = {"model_name_or_path": "tiny", "output_dir": "out", "gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("value", "operators"),
    [
        (False, None),
        (True, ["cudnn", "efficient", "flash"]),
        ({"save": ["attention", "aten::mm"]}, ["mm", "cudnn", "efficient", "flash"]),
        ({"save": ["aten::mm", "aten::addmm", "aten::bmm"]}, ["addmm", "bmm", "mm"]),
    ],
    ids=["off", "on", "both", "products"],
)
def test_axolotl_lists_what_to_keep(tmp_path: Path, value: Any, operators: list[str] | None) -> None:
    recipe, report = read(tmp_path, {**AXOLOTL, "selective_checkpointing": value})
    kept = None if recipe.selective is None else recipe.selective.split("+")
    assert (kept is None) == (operators is None)
    assert len(kept or ()) == len(operators or ())
    assert all(any(word in name for name in kept or ()) for word in operators or ())
    assert report.unknown == ()


@pytest.mark.parametrize("value", [{"save": ["aten::softmax"]}, {"save": "mm"}, {"offload": True}], ids=str)
def test_other_choices_of_axolotl_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UnsupportedError, match="selective_checkpointing: this choice of kept outputs is not supported"):
        read(tmp_path, {**AXOLOTL, "selective_checkpointing": value})
    assert read(tmp_path, {**AXOLOTL, "selective_checkpointing": value}, selective="matmuls")[0].selective == "matmuls"


def test_transformers_checkpoints_every_nth_layer(tmp_path: Path) -> None:
    recipe, report = read(tmp_path, {**TRAINER, "gradient_checkpointing_kwargs": {"every_n_layers": 3}})
    assert (recipe.checkpoint_every, report.unknown) == (3, ())
    off = {**TRAINER, "gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"every_n_layers": 3}}
    assert read(tmp_path, off)[0].checkpoint_every == 1


@pytest.mark.parametrize("offload", [True, "legacy", "disk"])
def test_axolotl_offloads_activations(tmp_path: Path, offload: Any) -> None:
    if offload is True:
        assert read(tmp_path, {**AXOLOTL, "activation_offloading": True})[0].activation_offload
    else:
        with pytest.raises(UnsupportedError, match=f"activation offloading {offload} is not supported yet"):
            read(tmp_path, {**AXOLOTL, "activation_offloading": offload})


def test_offloaded_activations_under_another_engine_are_refused_by_key(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"activation_offloading: offloading of activations under fsdp2 .* Take"):
        read(tmp_path, {**AXOLOTL, "activation_offloading": True, "fsdp_version": 2, "fsdp_config": {"version": 2}})


def test_checkpoints_in_main_memory(tmp_path: Path) -> None:
    old = read(tmp_path, {**AXOLOTL, "gradient_checkpointing": "offload"})[0]
    assert (old.checkpointing, old.activation_offload) == (True, True)
    with pytest.raises(UnsupportedError, match="offload: True: checkpoints in main memory"):
        read(tmp_path, {**TRAINER, "gradient_checkpointing_kwargs": {"offload": True}})


ADAPTED = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj"], "loss_type": "nll", "max_length": 64}


def test_modules_trained_next_to_adapters(tmp_path: Path) -> None:
    trl = {**TRAINER, **ADAPTED, "dataset_name": "x", "lora_modules_to_save": ["model.embed_tokens", "lm_head"]}
    assert read(tmp_path, trl)[0].modules_to_save == "embed_tokens+lm_head"
    assert read(tmp_path, trl, modules_to_save="norm")[0].modules_to_save == "norm"
    assert read(tmp_path, {**trl, "use_peft": False})[0].modules_to_save is None
    with pytest.raises(UnsupportedError, match="full training of score next to adapters is not supported yet"):
        read(tmp_path, {**trl, "lora_modules_to_save": ["score"]})


def test_dora(tmp_path: Path) -> None:
    trl = {**TRAINER, **ADAPTED, "dataset_name": "x", "use_dora": True}
    assert read(tmp_path, trl)[0].dora
    assert not read(tmp_path, {**trl, "use_peft": False})[0].dora
    with pytest.raises(UnsupportedError, match="DoRA over 4-bit weights is not supported yet"):
        read(tmp_path, {**trl, "load_in_4bit": True})


def test_a_file_of_operators(tmp_path: Path) -> None:
    path = tmp_path / "policy.txt"
    path.write_text("# products\naten.mm.default/2\n\naten.bmm.default  # scores\n", encoding="utf-8")
    recipe = TrainingRecipe(model="tiny", selective=str(path))
    assert recipe.selective == "aten.bmm.default+aten.mm.default/2"
    path.unlink()
    assert TrainingRecipe.from_json(recipe.to_json()).selective == recipe.selective


@pytest.mark.parametrize("text", ["", "# nothing\n", "mm\n", "aten.mm.default and more\n", "\x1b[31m\n"])
def test_other_files_are_refused_in_a_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policy.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match=r"policy\.txt: ") as caught:
        TrainingRecipe(model="tiny", selective=str(path))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"selective": "matmul"}, "'matmul' is neither a file nor an operator"),
        ({"selective": "attention-8x8"}, "'attention-8x8' is neither"),
        ({"selective": "matmuls", "checkpointing": False}, "--selective does not go with --no-checkpointing"),
        ({"selective": "matmuls", "reentrant": True}, "--selective does not go with --reentrant"),
        ({"selective": "matmuls", "liger": "all"}, "writes over kept outputs"),
        ({"dora": True, "qlora": 4}, "--dora needs --lora"),
        ({"modules_to_save": "lm_head"}, "--modules-to-save needs --lora or --qlora"),
        (
            {"modules_to_save": "q_proj", "lora": 4},
            "--modules-to-save cannot take 'q_proj'. Choose from: embed",
        ),
        ({"checkpoint_every": 2, "checkpointing": False}, "--checkpoint-every does not go with --no-checkpointing"),
        (
            {"checkpoint_every": 2, "engine": "deepspeed", "precision": "mixed"},
            "--checkpoint-every is not supported with --engine deepspeed yet",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        TrainingRecipe(model="tiny", **options)
