"""Evaluations that keep their graphs, in training on the simulated GPU, with stamps and without."""

from contextlib import closing, nullcontext
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.roles import Role
from ligerprof.runs.outcome import Progress
from ligerprof.runs.recording.phases import LoopPhases
from ligerprof.runs.simulated.worker import worker
from tests.analyzers.attribution.test_simulated_programs import Program

SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
TOLERANCE = 0.02


def evaluated(model: Any, *, grads: bool, cache: bool = False) -> float:
    total = 0
    for _ in range(2):
        tokens = torch.zeros(8, 256, dtype=torch.long)
        with nullcontext() if grads else torch.no_grad():
            # the last loss still has its graph while the next one is computed
            loss = model(input_ids=tokens, labels=tokens, use_cache=cache).loss
            total += loss.detach()
    return total


def report(**options: Any) -> PeakReport:
    found: PeakReport = worker().run(f"{__name__}:report_here", None, lambda _text: None, **options)
    return found


def report_here(_progress: Progress, *, stamped: bool, checkpointing: bool, **options: Any) -> PeakReport:
    """The report of a program on the simulated GPU of this process."""
    program = Program(native=False)
    with program.running():
        with closing(LoopPhases(program.device.stamp)) if stamped else nullcontext() as phases:
            if phases is not None:
                phases.open()
            model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=8000))
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                tokens = torch.zeros(2, 256, dtype=torch.long)
                model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            evaluated(model, **options)
        snapshot = program.snapshot()
    return analyze(snapshot).peak


@pytest.mark.parametrize("stamped", [True, False], ids=["stamps", "stacks"])
@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "kept"])
def test_an_evaluation_that_keeps_its_graph_needs_no_grad(stamped: bool, checkpointing: bool) -> None:
    found = report(stamped=stamped, checkpointing=checkpointing, grads=True)
    without = report(stamped=stamped, checkpointing=checkpointing, grads=False)

    first = found.suggestions[0]

    assert found.roles[Role.CHECKPOINTS] == 0
    assert found.roles[Role.ACTIVATIONS] > found.peak_bytes / 3
    assert first.name == "no-grad"
    assert first.new_peak_bytes == pytest.approx(without.peak_bytes, rel=TOLERANCE)
    assert not {"no-grad"} & {one.name for one in without.suggestions}


def test_a_cache_of_keys_and_values_is_no_graph() -> None:
    found = report(stamped=False, checkpointing=False, grads=False, cache=True)

    assert "no-grad" not in {one.name for one in found.suggestions}
