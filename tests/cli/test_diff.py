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
    path = tmp_path / "diff.html"
    arguments = ["diff", PLAIN, FUSED, "--html", str(path)]
    result = CliRunner().invoke(main, arguments)

    assert (result.exit_code, result.stderr) == (0, f"wrote {path}\n")
    page = path.read_text(encoding="utf-8")
    assert page.count('class="recording"') == 2

    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 1
    assert "--force" in again.stderr
    assert CliRunner().invoke(main, [*arguments, "--force"]).exit_code == 0
