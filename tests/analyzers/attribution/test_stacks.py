"""The phase of training that a stack shows."""

import pytest

from ligerprof.analyzers.attribution.stacks import StackReader
from ligerprof.roles import Phase

SITE = "/env/lib/python3.11/site-packages/"
SCRIPT = [("/home/me/train.py", "main"), ("/home/me/train.py", "<module>")]
STEP = [(SITE + "torch/optim/optimizer.py", "wrapper"), *SCRIPT]
FORWARD = [(SITE + "torch/nn/modules/linear.py", "forward"), ("/home/me/model.py", "forward")]
ENGINE = ("torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)",)
STACKS = {
    "forward": (Phase.FORWARD, [*FORWARD, *SCRIPT], ()),
    "a loss in the script": (Phase.FORWARD, [(SITE + "torch/nn/functional.py", "mse_loss"), *SCRIPT], ()),
    "the step of torch's optimizer": (Phase.OPTIMIZER, [(SITE + "torch/optim/sgd.py", "step"), *STEP], ()),
    "the step of the script's own optimizer": (Phase.OPTIMIZER, [("/home/me/train.py", "step"), *STEP], ()),
    "a step that is compiled": (
        Phase.OPTIMIZER,
        [("/tmp/torchinductor_me/ab/cabc.py", "call"), (SITE + "torch/_functorch/aot_autograd.py", "forward"), *STEP],
        (),
    ),
    "forward in a closure of the step": (Phase.FORWARD, [*FORWARD, ("/home/me/train.py", "closure"), *STEP], ()),
    "backward in a closure of the step": (
        Phase.BACKWARD,
        [(SITE + "torch/autograd/graph.py", "_engine_run_backward"), ("/home/me/train.py", "closure"), *STEP],
        (),
    ),
    "a hook that steps the optimizer in backward": (
        Phase.OPTIMIZER,
        [(SITE + "torch/optim/adam.py", "step"), (SITE + "torch/optim/optimizer.py", "wrapper"), ("/me/a.py", "hook")],
        ENGINE,
    ),
    "recomputation": (
        Phase.BACKWARD,
        [*FORWARD, (SITE + "torch/utils/checkpoint.py", "recompute_fn"), ("/home/me/a.py", "unpack_hook")],
        ENGINE,
    ),
    "autograd's thread": (Phase.BACKWARD, [], ENGINE),
    "moving a model": (Phase.BUILD, [(SITE + "torch/nn/modules/module.py", "_apply"), *SCRIPT], ()),
    "a function of the script that converts data": (Phase.OUTSIDE, [("/home/me/data.py", "convert"), *SCRIPT], ()),
    "a function of the script that loads data": (Phase.OUTSIDE, [("/home/me/data.py", "_load_batch"), *SCRIPT], ()),
    "the script": (Phase.OUTSIDE, SCRIPT, ()),
    "C++ without autograd": (None, [], ("at::_ops::linear::call(at::Tensor const&)",)),
}


@pytest.mark.parametrize("name", sorted(STACKS))
def test_phase_of_a_stack(name: str) -> None:
    phase, calls, native = STACKS[name]
    frames = [{"filename": "??", "line": 0, "name": function} for function in native]
    frames = [*({"filename": file, "line": 1, "name": function} for file, function in calls), *frames]
    assert StackReader().read(frames).phase is phase


def test_the_recorders_own_calls_are_not_part_of_a_stack() -> None:
    recorder = ("/env/ligerprof/runs/recording/phases.py", "__call__")
    own = [("/home/me/ligerprof/runs/training.py", "train"), ("/home/me/recording/phases.py", "__call__")]
    calls = [FORWARD[0], recorder, FORWARD[1], recorder, *own, *SCRIPT]
    frames = [{"filename": file, "line": 1, "name": function} for file, function in calls]

    assert [call.function for call in StackReader().read(frames).calls] == [
        "forward",
        "forward",
        "train",
        "__call__",
        "main",
        "<module>",
    ]


def test_endless_names_are_cut_where_rules_do_not_look() -> None:
    frame = {"filename": "/x" * 5000 + "/site-packages/torch/optim/adam.py", "name": "step" + "y" * 5000, "line": 1}

    (call,) = StackReader().read([frame]).calls

    assert call.file == "torch/optim/adam.py"
    assert (call.function[:5], len(call.function)) == ("stepy", 1000)
