import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ligerprof.cli.main import main
from ligerprof.roles import Role
from tests.golden import assert_matches_golden
from tests.paths import RECORDINGS

PLAIN = str(RECORDINGS / "hf-ckpt-4x1024.pickle.xz")
FUSED = str(RECORDINGS / "liger-flce-ckpt-4x1024.pickle.xz")
GOLDEN = Path(__file__).parent / "golden"


def test_json_has_the_keys_of_the_contract_and_adds_up() -> None:
    result = CliRunner().invoke(main, ["diff", PLAIN, FUSED, "--json"])

    diff = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (0, "")
    assert (diff["schema"], diff["kind"]) == (1, "diff")
    assert (diff["before"]["peak_bytes"], diff["after"]["peak_bytes"]) == (14124071936, 10538196480)
    assert diff["difference_bytes"] == 10538196480 - 14124071936
    assert list(diff["roles"]) == [role.value for role in Role]
    assert sum(role["difference_bytes"] for role in diff["roles"].values()) == diff["difference_bytes"]
    rounding = diff["roles"]["allocator_rounding"]["difference_bytes"]
    assert sum(block["difference_bytes"] for block in diff["blocks"]) + rounding == diff["difference_bytes"]
    assert diff["phases"]["forward"]["before_bytes"] == 13073464832


def test_printed_difference_is_the_golden_one() -> None:
    result = CliRunner().invoke(main, ["diff", PLAIN, FUSED, "--top", "6"])

    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert_matches_golden(result.stdout, GOLDEN / "diff.txt")


def test_a_file_against_itself_is_the_same() -> None:
    result = CliRunner().invoke(main, ["diff", PLAIN, PLAIN])

    assert result.stdout.startswith("The peak is the same, 13.15 GiB in backward: no role changed.")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        ([PLAIN], 2, "Missing argument"),
        ([PLAIN, "missing.pickle"], 2, "missing.pickle"),
        ([PLAIN, FUSED, "--device-index", "1"], 1, "has no device 1"),
        ([PLAIN, __file__], 1, "not a pickle"),
    ],
)
def test_what_cannot_be_compared_is_one_line(arguments: list[str], exit_code: int, says: str) -> None:
    result = CliRunner().invoke(main, ["diff", *arguments])

    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert says in result.stderr.splitlines()[-1]


def test_html_writes_a_page_and_keeps_an_existing_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "diff.html"
    arguments = ["diff", PLAIN, FUSED, "--html", str(path)]
    result = CliRunner().invoke(main, arguments)

    assert (result.exit_code, result.stderr) == (0, f"wrote {path}, in a new folder\n")
    page = path.read_text(encoding="utf-8")
    assert page.count('class="recording"') == 2

    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 1
    assert "--force" in again.stderr
    assert CliRunner().invoke(main, [*arguments, "--force"]).exit_code == 0


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("baseline") / "fused.json"
    path.write_text(CliRunner().invoke(main, ["explain", FUSED, "--json"]).stdout, encoding="utf-8")
    return path


def test_the_json_of_explain_serves_as_a_snapshot_does(baseline: Path) -> None:
    of_snapshots, of_json = (
        CliRunner().invoke(main, ["diff", each, PLAIN, "--json"]) for each in (FUSED, str(baseline))
    )

    assert (of_json.exit_code, of_json.stderr) == (0, "")
    assert json.loads(of_json.stdout) == json.loads(of_snapshots.stdout)


@pytest.mark.parametrize(
    ("limit", "exit_code"),
    # from 10538196480 to 14124071936 bytes: 34.03 %, 3585875456 bytes
    [("34%", 3), ("34.1 %", 0), ("0%", 3), ("3585875456", 0), ("3585875455", 3), ("3.4GiB", 0)],
)
def test_growth_over_the_limit_ends_in_3(baseline: Path, limit: str, exit_code: int) -> None:
    result = CliRunner().invoke(main, ["diff", str(baseline), PLAIN, "--max-growth", limit, "--json"])

    assert result.exit_code == exit_code
    assert json.loads(result.stdout)["difference_bytes"] == 3585875456
    if exit_code:
        assert result.stderr.startswith("Error: The peak grew by 3.34 GiB, from 9.81 GiB in backward to 13.15 GiB")
        assert result.stderr.endswith(f"That is over --max-growth {limit}.\n")


def test_a_smaller_peak_or_the_same_does_not_grow(baseline: Path) -> None:
    for before, after in ((PLAIN, FUSED), (str(baseline), FUSED)):
        assert CliRunner().invoke(main, ["diff", before, after, "--max-growth", "0%"]).exit_code == 0


def test_memory_that_ran_out_is_growth() -> None:
    leak = str(RECORDINGS / "oom-leak.pickle.xz")
    result = CliRunner().invoke(main, ["diff", PLAIN, leak, "--max-growth", "2%"])

    assert result.exit_code == 3
    assert "memory ran out in" in result.stderr
    assert "second snapshot: memory ran out, so its peak is what was reached" in " ".join(result.stdout.split())
    # a failure that the program caught does not count
    caught = str(RECORDINGS / "oom-caught.pickle.xz")
    assert CliRunner().invoke(main, ["diff", PLAIN, caught, "--max-growth", "2%"]).exit_code == 0


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"kind": "estimate"},
        {"peak_bytes": 5},
        {"peak_bytes": "x"},
        {"blocks": {}},
        {"blocks": []},
        {"blocks": [3]},
        {"blocks": [{"role": "colour", "phase": "forward", "layers": [], "bytes": 1, "count": 1}]},
        {"roles": {"parameters": None}},
        {"peak_phase": "noon"},
        {"device": -1.5},
    ],
)
def test_a_damaged_baseline_is_one_line(baseline: Path, change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(json.loads(baseline.read_text()) | change), encoding="utf-8")

    result = CliRunner().invoke(main, ["diff", str(path), PLAIN])

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"Error: {path}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("limit", ["2 percent", "-1%", "lots", "2%%"])
def test_a_wrong_limit_on_growth_ends_in_2(limit: str) -> None:
    assert CliRunner().invoke(main, ["diff", PLAIN, FUSED, "--max-growth", limit]).exit_code == 2


def test_a_page_needs_two_snapshots(baseline: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["diff", str(baseline), PLAIN, "--html", str(tmp_path / "page.html")])

    assert (result.exit_code, list(tmp_path.iterdir())) == (1, [])
    assert "--html needs two snapshots" in result.stderr
