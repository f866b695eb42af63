import json

from click.testing import CliRunner

from ligerprof.cli.main import main
from ligerprof.models import CONFIGS, load_model
from ligerprof.reports.terminal import PLAIN_WIDTH
from tests.paths import REPOSITORY


def test_every_known_model_has_a_row_that_fits_the_page() -> None:
    result = CliRunner().invoke(main, ["models"])
    assert result.exit_code == 0
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert set(CONFIGS) <= set(rows)
    assert rows["llama3.2-1b"] == ["llama3.2-1b", "llama", "1,235,814,400", "16", "2048", "32/8", "128256", "yes"]
    assert max(map(len, result.stdout.splitlines())) <= PLAIN_WIDTH


def test_json_holds_what_the_estimate_starts_from() -> None:
    result = CliRunner().invoke(main, ["models", "--json"])
    printed = json.loads(result.stdout)
    assert (printed["schema"], printed["kind"]) == (1, "models")
    assert [model["name"] for model in printed["models"]] == list(CONFIGS)
    for model in printed["models"]:
        spec = load_model(model["name"])
        assert model["parameters"] == spec.parameter_count
        assert (model["layers"], model["hidden_size"], model["kv_heads"]) == (
            spec.layers,
            spec.hidden_size,
            spec.kv_heads,
        )
        assert model["tied_embeddings"] is spec.tied_embeddings


def test_the_page_shows_what_is_printed() -> None:
    page = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")
    shown = page.split("$ ligerprof models\n")[1].split("\n```")[0]
    printed = CliRunner().invoke(main, ["models"]).stdout.splitlines()
    assert shown.splitlines() == [line.rstrip() for line in printed if line.strip()]
