"""Simulated steps against steps that one H200 ran (torch 2.11, transformers 5.17; tests/data/truth)."""

import pytest

from ligerprof.errors import RecipeError
from ligerprof.units import MIB
from tests.truth import MeasuredStep, measured_steps, score

# docs/simulation.md quotes these
PEAK_TOLERANCE = 0.002
LIGER_PEAK_TOLERANCE = 0.01
PHASE_TOLERANCE = 0.004
RESERVED_TOLERANCE = 0.01
# which is more than that of a tiny model's step
SMALL_SEGMENT_BYTES = 2 * MIB
# rows that followed others in their process found freed address space and cuBLAS's workspaces there
USED_PROCESS_FIRST_STEP_TOLERANCE = 0.004

STEPS = measured_steps()
# the rest is marked slow: `pytest -m "not slow"` scores only these
QUICK = [step for step in STEPS if step.model in ("odd", "tiny")] + [step for step in STEPS if step.layers][::6]

pytestmark = pytest.mark.usefixtures("no_log_records")


def parameter(step: MeasuredStep) -> object:
    marks = [] if step in QUICK else [pytest.mark.slow]
    name = step.name + ("" if step.peak_bytes else " oom")
    return pytest.param(step, id=name.replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("step", [parameter(step) for step in STEPS])
def test_a_simulated_step_takes_what_the_gpu_took(step: MeasuredStep) -> None:
    try:
        scored = score(step)
    except RecipeError as error:
        pytest.skip(str(error))
    assert scored.verdict_agrees
    first_step_tolerance = PEAK_TOLERANCE if step.fresh else USED_PROCESS_FIRST_STEP_TOLERANCE
    assert abs(scored.first_step_error) <= first_step_tolerance
    if step.peak_bytes is None:
        return
    tolerance = LIGER_PEAK_TOLERANCE if step.options.get("provider") == "liger" else PEAK_TOLERANCE
    assert abs(scored.peak_error) <= tolerance
    assert abs(scored.worst_phase_error) <= PHASE_TOLERANCE
    if step.fresh and not step.options.get("alloc_conf") and step.options.get("loss") != "hf-4.45":
        distance = abs(scored.reserved_error)
        assert distance <= RESERVED_TOLERANCE or round(distance * step.reserved_bytes) <= SMALL_SEGMENT_BYTES
