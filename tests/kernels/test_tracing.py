"""torch.compile compiles patched models without a graph break, forward and backward."""

import json
import os
import subprocess
import sys

import pytest
import torch

from ligerprof.kernels import apply
from tests.kernels.models import tiny_model, train_once
from tests.kernels.oracle import relative_error
from tests.paths import REPOSITORY

# launches in the graphs of forward and backward: one layer, and a final norm
LAUNCHES = {
    # three norms, rope, swiglu; each norm's backward also launches the total of each parameter's partial sums
    "llama:rms+rope+swiglu": [3 + 2, 6 + 2],
    "gemma:geglu": [1, 1],
    "gpt2:layernorm+flce": [3, 9],
    # a graph for each of four lengths of rows. The losses are one operator each: see
    # `test_loss_outputs.test_compiled_in_one_graph`
    "rms:lengths": [1, 2] * 4,
    "rms-gaps:lengths": [1, 2] * 4,
    "rms-sequences:lengths": [1, 2] * 4,
    "rms-heads:lengths": [1, 2] * 4,
    "rope:lengths": [1, 1] * 4,
    "swiglu:lengths": [1, 1] * 4,
    "swiglu-sequences:lengths": [1, 1] * 4,
    "summed_swiglu:lengths": [1, 1] * 4,
    "swiglu_linear:lengths": [1, 1] * 4,
    "swiglu_linear-bias:lengths": [1, 1] * 4,
    "label_logits:lengths": [1, 1] * 4,
}


@pytest.mark.slow
def test_a_patched_model_is_one_graph_each_way() -> None:
    """In a separate process: this one interprets kernels."""
    cases = [*LAUNCHES]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.tracing", *cases],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    traced = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["case"]: row["launches"] for row in traced} == {case: LAUNCHES[case] for case in cases}
    assert not any(row["twice"] or row["views"] for row in traced)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_compiled_model_trains_as_the_eager_one(family: str) -> None:
    model = tiny_model(family, device="cuda")
    with apply(model, "all"):
        loss, gradients = train_once(model)
        compiled = torch.compile(model, fullgraph=True)
        compiled_loss, compiled_gradients = train_once(compiled)
    assert compiled_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients.items():
        assert relative_error(compiled_gradients[f"_orig_mod.{name}"], gradient) < 1e-4, name
