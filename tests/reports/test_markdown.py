from click.testing import CliRunner

from ligerprof.analyzers.explain.analysis import explain
from ligerprof.analyzers.explain.groups import BlockGroup
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.cli.main import main
from ligerprof.reports.markdown import peak_markdown
from ligerprof.roles import MemoryBreakdown, Phase, Role
from tests.paths import RECORDINGS

PLAIN = str(RECORDINGS / "hf-ckpt-4x1024.pickle.xz")
FUSED = str(RECORDINGS / "liger-flce-ckpt-4x1024.pickle.xz")


def tables(text: str) -> list[list[str]]:
    """The rows of each table, heads and rules included."""
    return [part.split("\n") for part in text.strip().split("\n\n") if part.startswith("|")]


def test_a_failure_comes_first_and_its_roles_add_up() -> None:
    report = explain(RECORDINGS / "oom-leak.pickle.xz")
    text = peak_markdown(report, top=3)

    assert text.startswith("Out of memory in backward of step 16: ")
    roles, blocks = tables(text)
    assert roles[:2] == ["| role | at the failure, MiB | share |", "|---|---:|---:|"]
    assert roles[-1] == "| total | 3,578.8 | 100.0 % |"
    assert len(blocks) == 2 + 3
    assert text.index("Peak 3703.8 MiB") > text.index("| total |")


def test_every_row_of_a_table_has_as_many_cells() -> None:
    for command in (["explain", PLAIN], ["diff", PLAIN, FUSED]):
        result = CliRunner().invoke(main, [*command, "--format", "markdown", "--top", "4"])

        assert (result.exit_code, result.stderr) == (0, "")
        found = tables(result.stdout)
        assert len(found) == 2
        for rows in found:
            assert len({row.count("|") for row in rows}) == 1


def test_names_from_a_file_have_no_effect() -> None:
    attack = "a|b</td>\n# `rm` *x* [l](http://e) @all &lt; \\"
    block = BlockGroup(
        role=Role.OTHER, size_bytes=5, count=1, module=attack, frame="", phase=Phase.BUILD, kept_by="<script>"
    )
    report = PeakReport(
        device=0,
        peak_bytes=5,
        reserved_bytes=5,
        complete=True,
        roles=MemoryBreakdown(roles={Role.OTHER: 5}),
        blocks=(block,),
        notes=(attack,),
    )

    text = peak_markdown(report)

    row = tables(text)[1][-1]
    assert row == (r"| other | 0.0 | 1 | a\|b\</td\> # \`rm\` \*x\* \[l\](http://e) \@all \&lt; \\ | \<script\> |")
    assert "<" not in text.replace(r"\<", "")


def test_json_wins_over_markdown() -> None:
    result = CliRunner().invoke(main, ["explain", PLAIN, "--format", "markdown", "--json"])

    assert result.stdout.startswith("{")
