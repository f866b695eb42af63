import json
from typing import Any

from click.testing import CliRunner

from ligerprof.cli.main import main
from ligerprof.models import CATALOG, load_model
from tests.paths import REPOSITORY


def models(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["models", *arguments])
    assert result.exit_code == 0
    return result.stdout


def found(*arguments: str) -> dict[str, Any]:
    printed: dict[str, Any] = json.loads(models("--json", *arguments))
    assert (printed["schema"], printed["kind"]) == (1, "models")
    return printed


def test_every_model_has_a_row_in_80_columns() -> None:
    printed = models()
    rows = [line.split() for line in printed.splitlines()]
    assert ["meta-llama/Llama-3.1-405B", "llama3.1-405b", "405.85", "B"] in rows
    assert [row.title for row in CATALOG] == [line[0] for line in rows if line and line[-1] in ("B", "M")]
    assert max(map(len, printed.splitlines())) <= 80


def test_json_holds_what_the_estimate_starts_from() -> None:
    printed = found()
    assert [model["name"] for model in printed["models"]] == [row.name for row in CATALOG]
    for model in printed["models"]:
        spec = load_model(model["name"])
        assert model["parameters"] == spec.parameter_count
        assert (model["layers"], model["hidden_size"], model["kv_heads"]) == (
            spec.layers,
            spec.hidden_size,
            spec.kv_heads,
        )
        assert model["tied_embeddings"] is spec.tied_embeddings
        assert all(load_model(name).parameter_count == model["parameters"] for name in model["hub_ids"])


def test_a_search_takes_every_word_in_any_case() -> None:
    names = [model["name"] for model in found("QWEN3", "4b")["models"]]
    assert names == ["qwen3-4b", "qwen3-14b"]
    assert [model["name"] for model in found("unsloth/qwen3-4b")["models"]] == ["qwen3-4b"]
    assert found("bloom-7b1") == {
        "schema": 1,
        "kind": "models",
        "models": [],
        "unsupported": {"bigscience/bloom-7b1": "bloom"},
    }


def test_a_search_without_a_match_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["models", "zzz"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "Error: no model has 'zzz' in its name. Run `ligerprof models` for all.\n"


def test_the_page_shows_what_is_printed() -> None:
    page = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")
    shown = page.split("$ ligerprof models qwen3-4b\n")[1].split("\n```")[0]
    printed = models("qwen3-4b").splitlines()
    assert shown.splitlines() == [line.rstrip() for line in printed if line.strip()]
    start = page.split("$ ligerprof models\n")[1].split("\n …")[0].splitlines()
    assert start == [line.rstrip() for line in models().splitlines() if line.strip()][: len(start)]
