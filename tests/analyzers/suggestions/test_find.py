import pytest

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.analyzers.suggestions.case import Edit, Framework
from ligerprof.analyzers.suggestions.rows import ROWS, Cost
from tests import recorded
from tests.analyzers.attribution.recording import MIB, Recording
from tests.paths import RECORDINGS
from tests.sampling import sampled

# how far a predicted lowering of the peak may be off
SAVING_TOLERANCE = 0.05

RECORDED = sorted(path.name.removesuffix(".pickle.xz") for path in RECORDINGS.glob("*.pickle.xz"))


def test_the_fused_loss_lowers_the_peak_as_liger_kernel_did() -> None:
    report = recorded.report("hf-ckpt-4x1024")
    # max_memory_allocated of the same step with liger-kernel's fused loss
    achieved = report.peak_bytes - recorded.report("liger-flce-ckpt-4x1024").peak_bytes

    suggestion = report.suggestions[0]

    assert suggestion.name == "fused-loss"
    assert suggestion.saves_bytes == pytest.approx(achieved, rel=SAVING_TOLERANCE)


@sampled("name", RECORDED, every=3)
def test_suggestions_are_sorted_and_add_up(name: str) -> None:
    analysis = recorded.analysis(name)
    report = analysis.peak
    costs = [list(Cost).index(one.cost) for one in report.suggestions]
    before = {one.saves_bytes + one.new_peak_bytes for one in report.suggestions if one.saves_bytes is not None}

    assert costs == sorted(costs)
    assert len(before) <= 1
    if not analysis.replayed.failures:
        assert before <= {report.peak_bytes}
    # all of them train or generate, some with passes that ran out of memory
    assert "no-grad" not in {one.name for one in report.suggestions}
    assert all(one.how for one in report.suggestions)


@pytest.mark.parametrize("name", [name for name in RECORDED if "ckpt" in name or "liger" in name])
def test_nothing_is_suggested_that_the_recording_already_does(name: str) -> None:
    names = {one.name for one in recorded.report(name).suggestions}

    assert not ("ckpt" in name and "nockpt" not in name and "checkpointing" in names)
    assert not ("liger" in name and "fused-loss" in names)


def test_every_row_has_lines_for_some_framework() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        lines = [line for framework in Framework for line in row.lines(framework)]
        assert lines, row.name
        assert all(line.strip() for line in lines), row.name


def test_an_edit_that_changes_nothing_keeps_the_peak() -> None:
    analysis = recorded.analysis("hf-ckpt-4x1024")

    assert Edit(analysis.replayed).highest(slice(None), None) == (analysis.peak.peak_bytes, analysis.peak_moment)


@pytest.mark.parametrize("name", ["oom-caught", "oom-leak", "oom-longer", "oom"])
def test_after_a_failure_suggestions_lower_what_the_failed_allocation_needed(name: str) -> None:
    analysis = recorded.analysis(name)
    failure = analysis.out_of_memory
    assert failure is not None

    needed = {
        one.saves_bytes + (one.new_peak_bytes or 0) for one in analysis.suggestions if one.saves_bytes is not None
    }

    # the peak of a step before the failure may be higher
    until = int(analysis.replayed.allocated_bytes[: analysis.replayed.failures[-1] + 1].max())
    assert needed == {max(until, failure.allocated_bytes + failure.requested_bytes)}
    # pages draw the whole recording
    after = analysis.bytes_after(next(one for one in analysis.suggestions if one.saves_bytes is not None))
    assert after is not None
    assert len(after) == len(analysis.replayed.allocated_bytes)


def test_outputs_that_a_program_frees_at_its_end_are_kept_outputs_of_every_pass_and_stay_with_half_the_batch() -> None:
    made, main = Recording(), ("train.py", 9, "<module>")
    forward = [("torch/nn/modules/linear.py", 125, "forward"), ("model.py", 5, "forward"), main]
    backward = [("??", 0, "GeluBackward0::apply"), ("??", 0, "torch::autograd::Engine::evaluate_function")]
    optimizer = [("torch/optim/adamw.py", 1, "step"), ("train.py", 12, "<module>")]
    kept = []
    for _ in range(5):
        kept.append(made.alloc(48 * MIB, forward))
        saved = made.alloc(16 * MIB, [forward[0], ("model.py", 6, "forward"), main])
        gradient = made.alloc(32 * MIB, backward)
        made.free(saved)
        made.free(gradient)
        made.free(made.alloc(MIB, optimizer))
    for block in kept:
        made.free(block)

    analysis = analyze(made.snapshot())
    saved_bytes = {each.name: each.saves_bytes for each in analysis.peak.suggestions}

    assert analysis.peak.peak_bytes == (5 * 48 + 16 + 32) * MIB
    assert saved_bytes["kept-outputs"] == 4 * 48 * MIB
    assert "del-outputs" not in saved_bytes
    # both halves of the logits are kept
    assert saved_bytes["half-batch"] == (16 + 32) * MIB // 2


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_outputs_that_two_passes_kept_until_memory_ran_out_are_kept_outputs(steps: int) -> None:
    made, main = Recording(), ("train.py", 9, "<module>")
    forward = [("torch/nn/modules/linear.py", 125, "forward"), ("model.py", 5, "forward"), main]
    backward = [("??", 0, "GeluBackward0::apply"), ("??", 0, "torch::autograd::Engine::evaluate_function")]
    optimizer = [("torch/optim/adamw.py", 1, "step"), ("train.py", 12, "<module>")]
    for _ in range(steps):
        for _ in range(3):
            made.alloc(48 * MIB, forward)
        made.free(made.alloc(8 * MIB, backward))
        made.free(made.alloc(MIB, optimizer))
    made.alloc(48 * MIB, forward)
    made.run_out(48 * MIB, forward)

    saved = {each.name: each.saves_bytes for each in analyze(made.snapshot()).peak.suggestions}
    # what one pass leaves may be a buffer; of more, everything goes but one pass
    if steps == 1:
        assert "kept-outputs" not in saved
    else:
        # freeing the last pass alone would not help in the step after
        assert "del-outputs" not in saved
        assert (3 * steps - 3) * 48 * MIB < saved["kept-outputs"] <= 3 * steps * 48 * MIB
