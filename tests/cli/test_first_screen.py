"""Five jobs of a newcomer: one command each, whose answer is on the first screen of 80 columns and 24 lines."""

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from ligerprof.cli.main import main
from tests.paths import RECORDINGS, REPOSITORY

AXOLOTL = """base_model: meta-llama/Llama-3.1-8B
micro_batch_size: 1
gradient_accumulation_steps: 4
sequence_len: 16384
bf16: true
gradient_checkpointing: true
flash_attention: true
fsdp_version: 2
fsdp_config:
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""


@pytest.mark.parametrize(
    ("command", "answers"),
    [
        pytest.param(
            "advise --no-simulate --config trl-sft=docs/examples/sft.yaml --gpu rtx4090",
            ['+ dtype: "bfloat16"'],
            marks=pytest.mark.slow,
        ),
        ("estimate --config {axolotl} --gpus 8 --gpu h100", ["It fits in 77.61 GiB", "whole gradients", "14.96 GiB"]),
        ("explain {recordings}/oom.pickle.xz", ["1.96 GiB requested", "alone, the cheapest first: a fused linear"]),
        ("explain {recordings}/oom-leak.pickle.xz", ["Grew by 125.0 MiB in each of 15 steps", "keep numbers or host"]),
        pytest.param(
            "fit --model gemma2-2b --gpu a100-40g --no-simulate",
            ["Largest batch at 1024 tokens: none", "bf16 weights: largest batch 4"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_first_screen_has_the_answer(
    command: str, answers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    axolotl = tmp_path / "axolotl.yaml"
    axolotl.write_text(AXOLOTL, encoding="utf-8")
    words = shlex.split(command.format(axolotl=axolotl, recordings=RECORDINGS))
    lines = CliRunner().invoke(main, words, env={"COLUMNS": "80"}).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    screen = " ".join(" ".join(lines[:23]).split())
    assert [answer for answer in answers if answer not in screen] == []
