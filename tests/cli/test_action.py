"""The GitHub Action: its script as a runner calls it, with a stand-in for `gh`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.paths import RECORDINGS, REPOSITORY

ACTION = REPOSITORY / "action.yml"
SCRIPT = REPOSITORY / "action" / "check_memory.sh"
SMALL, FAILED = (str(RECORDINGS / f"small-{name}.pickle.xz") for name in ("lora", "oom"))


def run_action(folder: Path, **inputs: str) -> tuple[int, str, str]:
    """The exit code, the comment, and stderr."""
    programs = folder / "programs"
    programs.mkdir()
    for name, text in (
        ("ligerprof", f'exec "{sys.executable}" -m ligerprof "$@"'),
        ("gh", f'echo "$@" >"{folder}/called"; while [[ $1 != --body-file ]]; do shift; done; cp "$2" "{folder}/body"'),
    ):
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(SCRIPT)],
        env={
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "GITHUB_STEP_SUMMARY": str(folder / "summary"),
            "GITHUB_REPOSITORY": "someone/project",
            "PULL_REQUEST": "7",
            "INSTALL": "false",
            **inputs,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=REPOSITORY,
    )
    body = folder / "body"
    comment = body.read_text() if body.exists() else ""
    if comment:
        assert comment == (folder / "summary").read_text() == done.stdout
        assert (folder / "called").read_text().startswith("pr comment 7 --repo someone/project ")
    return done.returncode, comment, done.stderr


def test_every_input_reaches_the_script() -> None:
    action = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    (step,) = action["runs"]["steps"]
    given = {match for value in step["env"].values() for match in re.findall(r"inputs\.([a-z-]+)", value)}
    assert given == set(action["inputs"])
    script = SCRIPT.read_text(encoding="utf-8")
    assert [name for name in step["env"] if name not in script and name != "GH_TOKEN"] == []
    assert (REPOSITORY / step["run"].split('"$GITHUB_ACTION_PATH/')[1].rstrip('"')) == SCRIPT


def test_a_recording_that_grew_fails_and_the_comment_says_which_role(tmp_path: Path) -> None:
    code, comment, error = run_action(tmp_path, RECORDING=FAILED, BASELINE=SMALL, MAX_GROWTH="2%", MAX_PEAK="4GiB")

    assert code == 3
    assert "which --max-growth 2% does not allow" in error
    assert comment.index("### Change of the peak") < comment.index("### Peak memory")
    assert "| ce\\_temporaries | " in comment
    assert "**Error: memory ran out in " in comment


def test_a_recording_within_its_limit_passes(tmp_path: Path) -> None:
    code, comment, error = run_action(tmp_path, RECORDING=SMALL, MAX_PEAK="4GiB")
    assert (code, error) == (0, "")
    assert comment.startswith("### Peak memory\n\nPeak ")


def test_a_configuration_is_estimated_against_a_gpu(tmp_path: Path) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text("model_name_or_path: Qwen/Qwen3-4B\nper_device_train_batch_size: 8\nmax_length: 4096\n")
    code, comment, _ = run_action(tmp_path, CONFIG=f"trl-sft={config}", GPU="rtx4090")
    assert code == 3
    assert "### Estimated memory" in comment
    assert "does not fit" in comment.lower()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "name a recording or a config"),
        ({"BASELINE": SMALL, "CONFIG": "sft.yaml"}, "baseline needs a recording"),
        ({"RECORDING": SMALL, "MAX_GROWTH": "2%"}, "max-growth needs a baseline"),
        ({"RECORDING": SMALL, "GPU": "h100"}, "memory-limit and gpu need a config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inputs_that_do_not_go_together_are_named(inputs: dict[str, str], message: str, tmp_path: Path) -> None:
    code, comment, error = run_action(tmp_path, **inputs)
    assert (code, comment) == (2, "")
    assert message in error


def test_an_error_is_worse_than_a_limit(tmp_path: Path) -> None:
    code, comment, _ = run_action(tmp_path, RECORDING=str(tmp_path / "none.pickle"), CONFIG="", COMMENT="true")
    assert code == 2
    assert "none.pickle" in comment
