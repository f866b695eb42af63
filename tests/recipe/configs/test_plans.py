"""Plans in the words of files: the changed files, read again, are what the ladder counts."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from ligerprof.analyzers.search.changes import LADDER
from ligerprof.errors import LigerprofError
from ligerprof.recipe.configs.edits import OwnFiles
from ligerprof.recipe.configs.resolve import load_recipe
from tests.recipe.configs.test_edits import ACCELERATE, ACCELERATE_FSDP, FILES, TITAN
from tests.recipe.configs.texts import write

LAUNCHED = "trl-sft and accelerate"
TEXTS: dict[str, tuple[str, ...]] = {
    **{name: (text,) for name, text in FILES.items()},
    "accelerate": (ACCELERATE,),
    "fsdp2": (ACCELERATE_FSDP,),
    LAUNCHED: (FILES["trl-sft"], ACCELERATE),
    "torchtitan": (TITAN,),
}


def own_files(folder: Path, name: str, **others: Any) -> OwnFiles:
    names = [write(folder, f"{index}.{suffix_of(text)}", text) for index, text in enumerate(TEXTS[name])]
    given = {"model": "tiny", **({} if "accelerate" in name or name == "fsdp2" else {"gpus": 2})}
    recipe, report = load_recipe(names, given)
    return OwnFiles(sources=names, given=given, files=report.files, recipe=recipe, **others)


def suffix_of(text: str) -> str:
    return "toml" if text == TITAN else "yaml"


def settled(own: OwnFiles, rung: str) -> Any:
    outcome = next(change for change in LADDER if change.name == rung).outcome(own.recipe)
    return outcome if isinstance(outcome, str) else own.settle(outcome[0])


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_copies_on_the_disk_say_what_was_counted(name: str, tmp_path: Path) -> None:
    own, applied = own_files(tmp_path, name), 0
    for change in LADDER:
        try:
            outcome = change.outcome(own.recipe)
            plan = outcome if isinstance(outcome, str) else own.settle(outcome[0])
        except LigerprofError:
            continue
        if isinstance(plan, str):
            continue
        written = own.write(plan)
        assert written.recipe == plan, change.name
        missing = {name for edit in written.edits for name in edit.missing}
        copies = [
            write(tmp_path, f"fixed-{Path(edit.file).name}", edit.content) for edit in written.edits if edit.content
        ]
        again, _ = load_recipe(copies, own.given)
        again = again if again.kernels else dataclasses.replace(again, provider=plan.provider)
        assert dataclasses.replace(again, **{name: getattr(plan, name) for name in missing}) == plan, change.name
        applied += 1
    assert applied >= 4


def test_the_plan_is_what_the_framework_makes_of_the_keys(tmp_path: Path) -> None:
    eight_bit = settled(own_files(tmp_path, "transformers"), "adamw-8bit")
    assert (eight_bit.optimizer, eight_bit.fp32_embedding_states) == ("adamw-8bit", True)
    adapters = settled(own_files(tmp_path, "llama-factory"), "lora")
    assert (adapters.lora, adapters.precision) == (16, "bf16-amp")
    own = own_files(tmp_path, LAUNCHED)
    kernels = settled(own, "kernels")
    # liger-kernel's, without the fused loss that TRL refuses
    assert set(kernels.kernels) == {"rope", "rms", "swiglu"}
    sharded = own.settle(dataclasses.replace(own.recipe, engine="deepspeed", precision="mixed", zero=3))
    # adapters are gathered where the model is saved, which nobody has to ask for
    assert own.settle(dataclasses.replace(sharded, lora=16)).save_whole is True
    # a further change of a plan that the files have already said
    assert own.settle(dataclasses.replace(kernels, checkpointing=True)).kernels == kernels.kernels


def test_checkpointing_takes_selective_checkpointing_out_of_the_file(tmp_path: Path) -> None:
    text = TITAN.replace('"none"', '"selective"\nselective_ac_option = "op"')
    file = write(tmp_path, "titan.toml", text)
    recipe, report = load_recipe([file], {"model": "tiny"})
    assert recipe.selective == "torchtitan"
    own = OwnFiles(sources=[file], given={"model": "tiny"}, files=report.files, recipe=recipe)
    plan = settled(own, "checkpointing")
    assert (plan.checkpointing, plan.selective) == (True, None)
    (edit,) = own.write(plan).edits
    assert [change.key for change in edit.changes] == ["activation_checkpoint.mode"]


@pytest.mark.parametrize(
    ("name", "rung", "says"),
    [
        ("torchtitan", "kernels", "0.toml has no key for --liger all"),
        ("torchtitan", "lora", "0.toml has no key for --lora 16"),
        ("accelerate", "kernels", "0.yaml has no key for --liger all"),
    ],
)
def test_what_files_cannot_say_is_not_counted(name: str, rung: str, says: str, tmp_path: Path) -> None:
    assert str(settled(own_files(tmp_path, name), rung)).startswith(says)


def test_a_program_of_the_users_sets_what_its_files_have_no_key_for(tmp_path: Path) -> None:
    assert settled(own_files(tmp_path, "accelerate"), "lora").lora == 16
    # --provider: the user switches them on
    assert settled(own_files(tmp_path, "accelerate", switches_kernels=True), "kernels").liger == "all"


def test_a_search_parses_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # content of its own: parsed texts are kept
    file = write(tmp_path, "sft.yaml", FILES["trl-sft"] + f"output_dir: {tmp_path}\n")
    parsed: list[str] = []
    load = yaml.load
    monkeypatch.setattr(yaml, "load", lambda text, loader: (parsed.append(text), load(text, loader))[1])
    recipe, report = load_recipe([file], {})
    own = OwnFiles(sources=[file], given={}, files=report.files, recipe=recipe)
    assert {own.settle(dataclasses.replace(recipe, batch=batch)).batch for batch in (1, 2, 4)} == {1, 2, 4}
    assert len(parsed) == 1
