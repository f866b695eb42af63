"""Rules from a file take precedence over the built-in rules; anything else gives one line."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ligerprof.analyzers.attribution.rules import BlockFeatures, UserRule, read_rules
from ligerprof.analyzers.explain.analysis import analyze, explain
from ligerprof.cli.main import main
from ligerprof.errors import RulesError
from ligerprof.roles import Phase, Role
from tests.paths import REPOSITORY

STAMPED = REPOSITORY / "tests" / "data" / "snapshots" / "stamped-amp-ckpt-4x1024.pickle.xz"
STACKS = REPOSITORY / "tests" / "data" / "snapshots" / "small-python-alloc-nockpt.pickle.xz"
EXAMPLE = re.search(r"```toml\n(.*?)```", (REPOSITORY / "docs" / "roles.md").read_text(encoding="utf-8"), re.DOTALL)


def features(**given: object) -> BlockFeatures:
    texts = dict.fromkeys(("stack", "inner_stack", "native", "node"), "")
    values: dict[str, object] = {"phase": Phase.FORWARD, "features": frozenset(), **texts}
    return BlockFeatures(**(values | given))  # type: ignore[arg-type]


def test_the_documented_example_is_read(tmp_path: Path) -> None:
    pytest.importorskip("tomllib")
    assert EXAMPLE is not None
    path = tmp_path / "rules.toml"
    path.write_text(EXAMPLE.group(1), encoding="utf-8")

    adapters, cache, workspace = read_rules(path)

    assert adapters.matches(features(module="base.layers.0.q_proj.lora_A.default"))
    assert not adapters.matches(features(module="base.layers.0.q_proj"))
    assert cache.matches(features(stack="torch/x.py:f\nwork/my_model/cache.py:fill_rows\ntrain.py:main"))
    assert not cache.matches(features(stack="work/my_model/cache.py:read_rows"))
    assert workspace.matches(features(node="MyAttentionBackward", phase=Phase.BACKWARD))
    assert not workspace.matches(features(node="MyAttentionBackward"))


def test_every_condition_must_hold() -> None:
    rule = UserRule(role=Role.OTHER, module="a.*", frame="*/f.py:g", node="N?", phase=Phase.BACKWARD)
    fits = {"module": "a.b", "stack": "x/f.py:g", "node": "N1", "phase": Phase.BACKWARD}

    assert rule.matches(features(**fits))
    for key, other in (("module", "b"), ("stack", "x/f.py:gg"), ("node", "N"), ("phase", None)):
        assert not rule.matches(features(**(fits | {key: other})))


@pytest.mark.parametrize(
    ("recording", "rule"),
    [(STAMPED, {"module": "model.layers.*.mlp*"}), (STACKS, {"frame": "*/optim/*.py:_init_group"})],
    ids=["stamps", "stacks"],
)
def test_named_blocks_move_to_the_role_and_the_peak_stays(
    recording: Path, rule: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"rule": [{"role": "kernel_workspace", **rule}]}), encoding="utf-8")
    plain = explain(recording)
    assert plain.roles[Role.KERNEL_WORKSPACE] == 0

    ours = explain(recording, rules=read_rules(path))

    moved = ours.roles[Role.KERNEL_WORKSPACE]
    assert moved > 0
    assert ours.peak_bytes == plain.peak_bytes == ours.roles.total_bytes
    assert sum(max(0, plain.roles[role] - ours.roles[role]) for role in Role) == moved
    shown = analyze(recording, rules=read_rules(path)).timeline
    assert shown.roles[Role.KERNEL_WORKSPACE][shown.peak_column] == moved


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"rule": 5}',
        '{"rule": []}',
        '{"rule": [5]}',
        '{"rule": [{"role": "other"}]}',
        '{"rule": [{"module": "a"}]}',
        '{"rule": [{"role": "none", "module": "a"}]}',
        '{"rule": [{"role": "other", "phase": "night"}]}',
        '{"rule": [{"role": "other", "module": 5}]}',
        '{"rule": [{"role": "other", "module": ""}]}',
        '{"rule": [{"role": "other", "module": "' + "a" * 501 + '"}]}',
        '{"rule": [{"role": "other", "module": "a", "code": "b"}]}',
        '{"rule": [' + ",".join(['{"role": "other", "module": "a"}'] * 1001) + "]}",
        '{"rule": ' + "[" * 100_000,
        '{"rule": "\\ud800"',
    ],
    ids=range(17),
)
@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_invalid_rules_give_one_line(text: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rules.{suffix}"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(RulesError) as raised:
        read_rules(path)

    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_a_pattern_of_many_stars_ends() -> None:
    # a matcher that backtracks over the stars would exceed the timeout of the suite
    rule = UserRule(role=Role.OTHER, frame="*a" * 200 + "b")

    assert not rule.matches(features(stack="a" * 20_000))


def test_the_command_takes_rules_and_reports_invalid_ones(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text('{"rule": [{"role": "other", "frame": "*"}]}', encoding="utf-8")

    done = CliRunner().invoke(main, ["explain", str(STACKS), "--rules", str(path), "--json"])
    roles = json.loads(done.stdout)["roles"]
    path.write_text("{", encoding="utf-8")
    failed = CliRunner().invoke(main, ["explain", str(STACKS), "--rules", str(path)])

    assert done.exit_code == 0
    assert roles["other"] + roles["allocator_rounding"] == json.loads(done.stdout)["peak_bytes"]
    assert failed.exit_code == 1
    assert failed.stderr.count("\n") == 1
    assert str(path) in failed.stderr
