"""Models of transformers on a simulated GPU: main memory, loading, layers that repeat; see model_checks.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import REPOSITORY


@pytest.mark.slow
def test_models_load_without_values_and_decode_as_if_all_layers_ran(tmp_path: Path) -> None:
    program = Path(__file__).with_name("model_checks.py")
    ours = [sys.executable, "-m", "ligerprof", "run", "--device", "simulated", "--json", "-o", str(tmp_path / "run")]
    environment = {"HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*ours, "--", sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    assert "all checks passed" in done.stderr
    assert json.loads(done.stdout)["ranks"][0]["simulated"]["stand_ins"] == ["HuggingFaceTB/SmolLM2-135M"]
