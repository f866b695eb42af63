from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.analyzers.suggestions.rows import Suggestion
from ligerprof.snapshots.reader import Snapshot
from tests.analyzers.attribution.recording import MIB, Recording

MAIN = ("train.py", 9, "<module>")
BUILD = [("torch/nn/modules/module.py", 1, "_apply"), ("torch/nn/modules/module.py", 1, "cuda"), MAIN]
FORWARD = [("torch/nn/modules/linear.py", 125, "forward"), ("model.py", 5, "forward"), MAIN]
BACKWARD = [("??", 0, "MmBackward0::apply"), ("??", 0, "torch::autograd::Engine::evaluate_function")]
STATES = [("torch/optim/adamw.py", 1, "_init_group"), ("torch/optim/adamw.py", 1, "step"), MAIN]
TEMPORARY = [("torch/optim/adam.py", 1, "_multi_tensor_adam"), ("torch/optim/adamw.py", 1, "step"), MAIN]


def failed_step(*, activation_mib: int, temporaries_mib: int, zero_grad: str) -> tuple[Suggestion, ...]:
    """Suggestions for a first optimizer step that ran out of memory: 60 MiB each of weights, gradients and a state.

    Args:
        zero_grad: when the program called it: `before` forward, or `late`, just before backward.
    """
    made, annotations = Recording(), []

    def annotate(name: str) -> None:
        now = len(made.events) + 0.5
        for stage in ("START", "END"):
            annotations.append({"name": name, "stage": stage, "time_us": int(now * 10), "device": 0})

    for _ in range(3):
        made.alloc(20 * MIB, BUILD)
    if zero_grad == "before":
        annotate("Optimizer.zero_grad#AdamW.zero_grad")
    saved = [made.alloc(activation_mib * MIB, FORWARD) for _ in range(4)]
    if zero_grad == "late":
        annotate("Optimizer.zero_grad#AdamW.zero_grad")
    for block in reversed(saved):
        if block in saved[:3]:
            made.alloc(20 * MIB, BACKWARD)
        made.free(block)
    annotations.append(
        {"name": "Optimizer.step#AdamW.step", "stage": "START", "time_us": len(made.events) * 10, "device": 0}
    )
    for _ in range(3):
        made.alloc(20 * MIB, STATES)
    for _ in range(3):
        made.alloc(temporaries_mib * MIB // 3, TEMPORARY)
    made.run_out(20 * MIB, TEMPORARY)
    for number, event in enumerate(made.events):
        event["time_us"] = number * 10 + 9
    # what was reserved, nothing more, fits
    made.events[0]["size"] = (180 + temporaries_mib) * MIB
    found = Snapshot.from_dict({"device_traces": [made.events], "segments": [], "external_annotations": annotations})
    return analyze(found).suggestions


def fused(suggestions: tuple[Suggestion, ...]) -> Suggestion:
    return next(each for each in suggestions if each.name == "fused-optimizer")


def test_gradients_that_the_next_forward_would_hold_are_freed_by_the_first_suggestion() -> None:
    late = fused(failed_step(activation_mib=20, temporaries_mib=45, zero_grad="late"))
    before = fused(failed_step(activation_mib=20, temporaries_mib=45, zero_grad="before"))

    # 60 weights, 60 states, 60 gradients and 80 activations, against 225
    assert late.lets_pass is True
    assert any("zero_grad" in line for line in late.how)
    assert "gradients of the first step" in late.condition
    assert before.lets_pass is True
    assert not any("zero_grad" in line for line in before.how)
    assert not before.condition


def test_gradients_that_fit_with_room_to_spare_need_no_other_change() -> None:
    late = fused(failed_step(activation_mib=4, temporaries_mib=45, zero_grad="late"))

    assert late.lets_pass is True
    assert not late.condition


def test_a_change_after_which_the_second_step_cannot_fit_is_not_enough() -> None:
    # 60 weights, 60 states, 120 activations, and 20 of gradients when the last ones are freed
    found = fused(failed_step(activation_mib=30, temporaries_mib=30, zero_grad="before"))

    assert found.lets_pass is False
    assert "second step" in found.condition
