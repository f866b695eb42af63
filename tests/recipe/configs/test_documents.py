"""Files of unknown origin: read as plain objects, or refused in one line, in bounded time."""

import json
from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import RecipeError
from ligerprof.recipe.configs.documents import read_document
from ligerprof.recipe.configs.sources import read_sources

LEVELS = 60
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 25))
MERGES = "a0: &a0 {k0: 1, l0: 2}\n" + "".join(
    f"a{n}: &a{n}\n  <<: [{', '.join(f'*a{n - 1}' for _ in range(9))}]\n  k{n}: 1\n" for n in range(1, 12)
)
HOSTILE = {
    "empty.yaml": "",
    "list.yaml": "- a\n- b\n",
    "number.json": "17",
    "unclosed.json": '{"a": ',
    "unclosed.yaml": "a: [1, 2\n",
    "tabs.yaml": "a:\n\t- b\n",
    "python-tag.yaml": "a: !!python/object/apply:os.system [true]\n",
    "name-tag.yaml": "a: !!python/name:os.system\n",
    "own-tag.yaml": "a: !thing 3\n",
    "deep.yaml": "a: " + "[" * LEVELS + "]" * LEVELS + "\n",
    "deep.json": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "deep-blocks.yaml": "".join(f"{'  ' * level}a:\n" for level in range(LEVELS)),
    "aliases.yaml": BOMB,
    "merges.yaml": MERGES,
    "itself.yaml": "a: &a [*a]\n",
    "digits.yaml": "a: " + "9" * 6000 + "\n",
    "digits.json": '{"a": ' + "9" * 6000 + "}",
    "list-key.yaml": "? [a, b]\n: c\n",
    "bad-toml.toml": "a = \n",
    "dotted.toml": "a." * 60_000 + "a = 1\n",
    "two-documents.yaml": "a: 1\n---\nb: 2\n",
    "escape.yaml": 'a: "\x1b]0;title\x07"\n',
    "null-bytes.yaml": "a: \0\n",
    "large.yaml": "a: " + "x" * 2**19 + "\n",
    "date.yaml": "a: 2026-99-99\n",
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_files_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(HOSTILE[name], encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        read_document(path)
    message = str(caught.value).replace(str(tmp_path), "")
    assert message.startswith(f"/{name}: ")
    assert message.isprintable()
    assert len(message) < 300


def test_not_text_and_no_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    with pytest.raises(RecipeError, match="no such file"):
        read_document(path)
    path.write_bytes(b"a: \xff\xfe")
    with pytest.raises(RecipeError, match="UTF-8"):
        read_document(path)
    with pytest.raises(RecipeError, match="not readable"):
        read_document(tmp_path)


def test_each_format_gives_the_same_object(tmp_path: Path) -> None:
    texts = {
        "a.yaml": "a: 1\nb:\n  c: [x, true, null]\n  d: 2e-5\n",
        "a.json": '{"a": 1, "b": {"c": ["x", true, null], "d": "2e-5"}}',
        "b.yaml": '{"a": 1, "b": {"c": ["x", true, null], "d": "2e-5"}}',
    }
    found = []
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        found.append(read_document(tmp_path / name))
    # YAML 1.1 reads a number without a point and with an exponent as text
    assert found == [{"a": 1, "b": {"c": ["x", True, None], "d": "2e-5"}}] * 3


def test_anchors_are_written_out_and_keys_become_text(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base: &base {x: 1}\nmore:\n  <<: *base\n  2: y\n  on: z\n  when: 2026-01-02\n", encoding="utf-8")
    assert read_document(path) == {"base": {"x": 1}, "more": {"x": 1, "2": "y", "True": "z", "when": "2026-01-02"}}


@pytest.mark.parametrize("value", [5, [1], {"a": "b"}, ["q_proj", None]], ids=repr)
@pytest.mark.parametrize(
    ("framework", "values"),
    [
        ("axolotl", {"base_model": "tiny", "adapter": "lora", "lora_target_modules": ...}),
        ("trl-sft", {"model_name_or_path": "tiny", "use_peft": True, "lora_target_modules": ...}),
        ("llama-factory", {"model_name_or_path": "tiny", "finetuning_type": "lora", "lora_target": ...}),
    ],
)
def test_names_of_adapted_modules_of_a_wrong_type_name_the_key(
    framework: str, values: dict[str, Any], value: Any, tmp_path: Path
) -> None:
    key = next(name for name, given in values.items() if given is ...)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**values, key: value}), encoding="utf-8")

    with pytest.raises(RecipeError, match=f"config.json: {key} is .*not a list of module names"):
        read_sources([f"{framework}={path}"])


@pytest.mark.parametrize(
    ("values", "framework"),
    [
        ({"model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}, "batch_size": 4}, "torchtune"),
        ({"data": {"train_batch_size": 8}, "actor_rollout_ref": {}, "trainer": {}}, "verl"),
        (
            {"model": "m", "train_type": "lora", "torch_dtype": "bfloat16", "max_length": 8, "output_dir": "o"},
            "ms-swift",
        ),
        ({"name": "megatron_gpt", "trainer": {"devices": 8}, "model": {}, "exp_manager": {}}, "NeMo"),
    ],
)
def test_files_of_frameworks_that_are_not_read_are_refused_by_name(
    values: dict[str, Any], framework: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(RecipeError, match=f"a configuration of {framework}, whose files ligerprof does not read"):
        read_sources([str(path)])
