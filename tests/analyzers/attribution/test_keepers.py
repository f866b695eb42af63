"""What keeps blocks alive, in recordings with and without the stacks of frees, and what only looks like evidence."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from ligerprof.analyzers.attribution.owners import PYTHON, Keeper, Keepers
from ligerprof.analyzers.attribution.stacks import StackReader
from ligerprof.analyzers.explain.analysis import SnapshotAnalysis, analyze, explain
from ligerprof.analyzers.explain.groups import BlockGroup, join_layers
from ligerprof.roles import Role
from ligerprof.snapshots.reader import Snapshot
from tests.paths import DATA, RECORDINGS
from tests.recorded import analysis, report
from tests.sampling import sampled

MIB = 2**20
START = 2**30
SMALL_RECORDINGS = sorted(path.name.removesuffix(".pickle.xz") for path in RECORDINGS.glob("s*.pickle.xz"))


@sampled("name", SMALL_RECORDINGS, every=4)
def test_blocks_rows_and_stacks_add_up_to_each_role(name: str) -> None:
    whole = analysis(name)
    plain = whole.peak
    by_stack = SnapshotAnalysis(whole.replayed, whole.attribution, step=None, stacks=True, notes=[]).peak

    expected = {role: plain.roles[role] for role in Role if plain.roles[role] and role is not Role.ALLOCATOR_ROUNDING}
    for groups in (plain.blocks, plain.rows, by_stack.blocks, by_stack.rows):
        assert sums(groups) == (expected, sum(block.count for block in plain.blocks))
    assert join_layers(plain.rows) == plain.rows
    assert all(block.frames == () for block in plain.blocks)
    for block in by_stack.blocks:
        place = block.frame.rpartition("/")[2]
        assert ":" not in place or any(line.rpartition("/")[2] == place for line in block.frames)


def sums(groups: Sequence[BlockGroup]) -> tuple[dict[Role, int], int]:
    by_role: Counter[Role] = Counter()
    for group in groups:
        by_role[group.role] += group.size_bytes
    return dict(by_role), sum(group.count for group in groups)


def test_release_of_saved_tensors_names_the_node_and_the_allocation_its_operation() -> None:
    # 16 layers without checkpointing, recorded as torch does by default; no stamps, so no modules
    rows = report("hf-nockpt-8x1024").rows
    kept = {(row.operation, row.frame, row.kept_by): row for row in rows if row.role is Role.ACTIVATIONS}

    hidden, intermediate = 8 * 1024 * 2048 * 2, 8 * 1024 * 8192 * 2
    for operation, place, keeper in (
        ("linear", "modeling_llama.py:175 forward", "SiluBackward0"),
        ("silu", "activations.py:103 forward", "MulBackward0"),
        ("linear", "modeling_llama.py:175 forward", "MulBackward0"),
        ("mul", "modeling_llama.py:175 forward", "MmBackward0"),
    ):
        row = kept[operation, place, keeper]
        assert (row.size_bytes, row.count, row.layers) == (16 * intermediate, 16, tuple(range(16)))
    rotary = kept["add", "modeling_llama.py:158 apply_rotary_pos_emb", "ScaledDotProductCudnnAttentionBackward0"]
    assert (rotary.size_bytes, rotary.count) == (16 * hidden, 16)
    log_probabilities = next(row for row in rows if row.kept_by == "LogSoftmaxBackward0")
    assert (log_probabilities.role, log_probabilities.operation) == (Role.CE_TEMPORARIES, "cross_entropy_loss")


def test_checkpointed_inputs_are_kept_by_the_checkpoint() -> None:
    for name in ("hf-ckpt-4x1024", "stamped-amp-ckpt-4x1024"):
        rows = report(name).rows
        assert {row.kept_by for row in rows if row.role is Role.CHECKPOINTS} == {"checkpoint"}


def test_stamped_recording_names_the_module_of_the_node() -> None:
    rows = report("stamped-amp-ckpt-4x1024").rows

    (cast,) = (row for row in rows if row.role is Role.WEIGHT_CASTS and row.module == "lm_head")
    assert (cast.operation, cast.kept_by, cast.kept_in) == ("linear", "MmBackward0", "lm_head")


@pytest.mark.parametrize("name", ["small-python-alloc-nockpt", "zero3-offload-4x1024"])
def test_frees_without_stacks_of_their_own_are_no_evidence(name: str) -> None:
    # with context="alloc", torch writes the stack of the allocation again
    assert {block.kept_by for block in report(name).blocks if block.role is not Role.CHECKPOINTS} == {""}


def frame(file: str, line: int, function: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": function}


MAIN = [frame("train.py", 9, "<module>")]
FORWARD = [frame("model.py", 5, "forward"), *MAIN]
NODE = "torch::autograd::generated::{}::{}"


def released_by(name: str, *, method: str = "release_variables") -> list[dict[str, Any]]:
    inner = frame("??", 0, NODE.format(name, f"{method}()"))
    return [inner, frame("??", 0, "torch::autograd::Engine::evaluate_function(x)")]


class Recording:
    """Writes a recording of blocks of one size in one large segment."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"action": "segment_alloc", "addr": START, "size": 64 * MIB, "frames": FORWARD, "stream": 0}
        ]

    def allocate(self, place: int, frames: Sequence[Any] = FORWARD, *, size_bytes: int = 2 * MIB) -> "Recording":
        return self._add("alloc", place, frames, size_bytes)

    def free(self, place: int, frames: Sequence[Any]) -> "Recording":
        return self._add("free_requested", place, frames)._add("free_completed", place, frames)

    def _add(self, action: str, place: int, frames: Sequence[Any], size_bytes: int = 2 * MIB) -> "Recording":
        self.events.append(
            {"action": action, "addr": START + place * 2 * MIB, "size": size_bytes, "frames": list(frames), "stream": 0}
        )
        return self

    def kept_by(self) -> list[tuple[str, str]]:
        snapshot = Snapshot.from_dict({"device_traces": [self.events], "segments": []})
        return [(block.kept_by, block.kept_in) for block in explain(snapshot).blocks]


def test_block_freed_while_a_node_runs_is_kept_by_the_node() -> None:
    apply = released_by("SiluBackward0", method="apply(x)")
    assert Recording().allocate(0).free(0, apply).kept_by() == [("SiluBackward0", "")]


def test_variable_of_the_program_keeps_its_block_until_the_line_that_drops_it() -> None:
    dropped = [frame("??", 0, "THPVariable_clear(THPVariable*)"), frame("train.py", 12, "step"), *MAIN]
    assert Recording().allocate(0).free(0, dropped).kept_by() == [(PYTHON, "train.py:12 step")]


def test_temporary_of_an_operator_is_not_kept_by_a_variable() -> None:
    inside = [frame("??", 0, "at::_ops::softmax::call(x)"), frame("model.py", 6, "forward"), *MAIN]
    same_call = [frame("??", 0, "THPVariable_clear(THPVariable*)"), *FORWARD]
    assert Recording().allocate(0).free(0, inside).kept_by() == [("", "")]
    assert Recording().allocate(0).free(0, same_call).kept_by() == [("", "")]


SILU, MUL = released_by("SiluBackward0"), released_by("MulBackward0")
IN_BACKWARD = [frame("??", 0, "torch::autograd::Engine::thread_main(x)")]
IN_OPTIMIZER = [frame("torch/optim/adam.py", 4, "step"), *MAIN]


def steps(*released: list[dict[str, Any]]) -> Recording:
    """Steps that each allocate a block in forward and release it in backward, and leave one in the optimizer."""
    made = Recording()
    for step, node in enumerate(released):
        made.allocate(0).allocate(1, IN_BACKWARD).free(0, node).free(1, node).allocate(2 + step, IN_OPTIMIZER)
    return made


def test_block_that_outlives_the_recording_takes_the_evidence_of_earlier_steps() -> None:
    # the second block of the call has no counterpart
    kept = steps(SILU, SILU).allocate(0).allocate(1).kept_by()
    assert sorted(set(kept)) == [("", ""), ("SiluBackward0", "")]


def test_blocks_of_earlier_steps_that_disagree_or_were_allocated_elsewhere_are_no_evidence() -> None:
    elsewhere = [frame("model.py", 8, "forward"), *MAIN]
    assert set(steps(SILU, SILU, MUL).allocate(0).allocate(1).kept_by()) == {("", "")}
    assert set(steps(SILU, SILU).allocate(0, elsewhere).allocate(1, elsewhere).kept_by()) == {("", "")}


def test_blocks_of_another_size_are_evidence_where_none_has_the_same() -> None:
    longer = steps(SILU, SILU).allocate(0, size_bytes=2 * MIB - 512).allocate(1)
    assert ("SiluBackward0", "") in longer.kept_by()


def test_evidence_of_a_place_is_read_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    of_block = Keepers._releaser

    def count(keepers: Keepers, block: int, freed_by: int) -> Keeper:
        read.append(block)
        return of_block(keepers, block, freed_by)

    monkeypatch.setattr(Keepers, "_releaser", count)
    made, between = Recording(), [frame("act.py", 3, "forward"), *FORWARD]
    for place in range(0, 80, 2):
        made.allocate(place).allocate(place + 1, between)
    made.allocate(80, IN_BACKWARD)
    for place in range(0, 80, 2):
        made.free(place, SILU).free(place + 1, MUL)
    made.free(80, MUL).allocate(81, IN_OPTIMIZER)
    for place in range(82, 282, 2):
        made.allocate(place, size_bytes=MIB + place * 512).allocate(place + 1, between)
    kept = Counter(keeper for keeper, _ in made.kept_by())

    assert set(kept) == {"", "SiluBackward0", "MulBackward0"}
    # each of the 81 that were freed, and the 64 newest of both places
    assert 2 <= len(read) <= 81 + 2 * 64


def test_two_calls_of_one_line_are_told_apart_by_the_call_before() -> None:
    made, between = Recording(), [frame("act.py", 3, "forward"), *FORWARD]
    for step in range(3):
        # down(act(gate(x)) * up(x)): the products of gate and up have the same stack
        made.allocate(0).allocate(1, between).allocate(2)
        if step < 2:
            made.allocate(3, IN_BACKWARD).free(3, MUL).free(2, MUL).free(1, MUL).free(0, SILU)
            made.allocate(4 + step, IN_OPTIMIZER)
    snapshot = Snapshot.from_dict({"device_traces": [made.events], "segments": []})
    kept = [owner.keeper.name for owner in analyze(snapshot).attribution.owners_at(len(made.events))]
    assert kept == ["", "", "SiluBackward0", "MulBackward0", "MulBackward0"]


def test_what_a_hook_packed_is_kept_by_the_checkpoint_if_there_is_one() -> None:
    hook = frame("??", 0, "torch::autograd::PySavedVariableHooks::~PySavedVariableHooks()")
    recomputed = [frame("model.py", 5, "forward"), frame("torch/utils/checkpoint.py", 9, "unpack_hook")]
    packed = [hook, *released_by("PowBackward0")]
    assert Recording().allocate(0).free(0, packed).kept_by() == [("", "")]
    again = Recording().allocate(0).allocate(1, recomputed).free(0, packed).free(1, released_by("MmBackward0"))
    assert sorted(again.kept_by()) == [("MmBackward0", ""), ("checkpoint", "")]


@pytest.mark.parametrize(
    ("functions", "calls", "operation"),
    [
        (["at::_ops::mm::call(a)", "at::_ops::linear::call(a)"], [("torch/nn/modules/linear.py", "forward")], "linear"),
        (["at::_ops::mul_Tensor::call(a)"], [("model.py", "forward")], "mul"),
        (["at::_ops::sum_dim_IntList::redispatch(a)"], [("model.py", "forward")], "sum"),
        # the interpreter's frames of the caller are no part of the operator
        (
            ["at::_ops::silu::call(a)", "_PyEval_EvalFrameDefault", "at::_ops::mm::call(a)"],
            [("m.py", "forward")],
            "silu",
        ),
        # autocast's cast of an argument
        (
            ["at::_ops::to_dtype::call(a)", "at::autocast::cached_cast(a)", "at::_ops::linear::call(a)"],
            [("torch/nn/modules/linear.py", "forward")],
            "to",
        ),
        # a kernel's function says more than the creation of its output
        (["at::_ops::empty_like::call(a)"], [("ops/rms_norm.py", "rms_norm_forward")], "rms_norm_forward"),
        # a dispatch mode runs inside of the operator
        (
            ["invokeOperatorFromPython()", "_PyEval_EvalFrameDefault", "at::_ops::addmm::call(a)"],
            [("torch/utils/checkpoint.py", "__torch_dispatch__"), ("model.py", "forward")],
            "addmm",
        ),
        # Python frames alone
        ([], [("torch/nn/functional.py", "silu")], "silu"),
        ([], [("torch/nn/modules/linear.py", "forward")], "linear"),
        ([], [("torch/nn/modules/conv.py", "_conv_forward")], "conv"),
        ([], [("model.py", "apply_rotary_pos_emb")], "apply_rotary_pos_emb"),
        ([], [("model.py", "forward")], ""),
    ],
)
def test_operation_of_a_stack(functions: list[str], calls: list[tuple[str, str]], operation: str) -> None:
    frames = [frame("??", 0, function) for function in functions] + [frame(file, 1, name) for file, name in calls]
    assert StackReader().read(frames).operation == operation


def test_block_that_its_own_backward_did_not_release_is_not_kept_for_backward() -> None:
    leaked = steps(SILU).allocate(0)
    leaked.allocate(1, IN_BACKWARD).free(1, SILU).allocate(8, IN_OPTIMIZER).allocate(9, IN_OPTIMIZER)
    assert set(leaked.kept_by()) == {("", "")}


def test_a_step_without_names_of_nodes_shows_what_the_detailed_steps_show() -> None:
    # `ligerprof.record` on an H100, torch 2.11: three steps of the model in tests/runs/recording/test_saved.py
    detailed, later = (explain(DATA / "recorder" / "three-steps.pickle.xz", step=step) for step in (2, 3))

    assert later.roles == detailed.roles
    assert [shown(block) for block in later.blocks] == [shown(block) for block in detailed.blocks]
    # in backward, some of the nodes of the detailed step have run already
    kept = [(before.kept_by, after.kept_by) for before, after in zip(detailed.blocks, later.blocks, strict=True)]
    assert all(before in after for before, after in kept)
    assert ("SiluBackward0", "MulBackward0, SiluBackward0") in kept


def shown(block: BlockGroup) -> tuple[Any, ...]:
    return block.role, block.module, block.layer, block.size_bytes, block.operation, block.kept_in
