"""Modules of a user's own, estimated through the library, against unchanged loops on the simulated GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ligerprof
from ligerprof.runs.tapes import own
from tests.runs.tapes.own_modules import Decoder, Scores, loss, train

ROOT = Path(__file__).parents[3]
_MOST_SECONDS = 120


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def _measured(tmp_path: Path, kind: str, batch: int, seq: int) -> tuple[int, int]:
    """Allocated and reserved bytes of the unchanged loop."""
    program = tmp_path / "program.py"
    program.write_text(f"from {train.__module__} import train\ntrain({kind!r}, {batch}, {seq})\n", encoding="utf-8")
    command = ["run", "--device", "simulated", "--gpu", "h200", "--", sys.executable, str(program)]
    printed = subprocess.run(
        [sys.executable, "-m", "ligerprof", *command],
        check=True,
        timeout=_MOST_SECONDS,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    ).stdout
    _, allocated, reserved = next(line for line in printed.splitlines() if line.startswith("figures")).split()
    return int(allocated), int(reserved)


@pytest.mark.parametrize("kind", ["own", pytest.param("given", marks=pytest.mark.slow)])
def test_an_own_module_takes_what_its_loop_takes(kind: str, tmp_path: Path) -> None:
    """At a size that was not traced: the tape is cached, and covers it."""
    options: dict[str, Any] = {"optimizer": "adamw-fused", "gpu": "h200"}
    model: nn.Module = (Decoder() if kind == "own" else Scores()).bfloat16()
    given = None if kind == "own" else loss
    ligerprof.estimate(model, loss=given, batch=3, seq=256, **options)
    traced = sorted(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.tape"))
    estimated = ligerprof.estimate(model, loss=given, batch=4, seq=384, **options)
    assert sorted(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.tape")) == traced != []
    assert (estimated.peak_bytes, estimated.reserved_bytes) == _measured(tmp_path, kind, 4, 384)


def test_the_digest_follows_the_module_and_its_loss() -> None:
    models = [Decoder(), Decoder(layers=2), Decoder().half()]
    specs = [own.spec_of(model, None, own.packed(model, None)) for model in models]
    again = Decoder()
    with torch.no_grad():
        next(again.parameters()).add_(1)
    assert len({spec.config_json for spec in specs}) == len(models)
    assert own.spec_of(again, None, own.packed(again, None)) == specs[0]
    scores = Scores()
    assert own.spec_of(scores, loss, own.packed(scores, loss)).vocab_size == scores.words.num_embeddings


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Scores(), {}, "Scores.forward takes no labels. Give `loss`"),
        (3, {}, "3 is neither a recipe nor a module of torch"),
        (Decoder(), {"lora": 8}, "lora is not covered for Decoder"),
        (Decoder(), {"checkpointing": True}, "checkpointing is not covered for Decoder"),
        (Decoder(), {"sequence": 3}, "sequence"),
    ],
)
def test_what_an_own_module_does_not_take(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ligerprof.LigerprofError, TypeError), match=message):
        ligerprof.estimate(model, **options)


def test_classes_that_another_process_cannot_import(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Decoder):
        pass

    monkeypatch.setattr(own, "find_spec", lambda _name: None)
    with pytest.raises(ligerprof.LigerprofError, match="Local cannot be sent to the process that traces it"):
        ligerprof.estimate(Local())
