"""Recording a training loop on the CPU: a mode that logs each operation replaces the history of the CUDA allocator."""

import contextlib
import gc
import pickle
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ligerprof
from ligerprof.analyzers.explain.analysis import explain
from ligerprof.errors import LigerprofError, MissingDependencyError, OutputError
from ligerprof.roles import STEP_PHASES, Phase, Role
from ligerprof.runs.recording.record import CudaHistory, Recorder, running
from ligerprof.runs.recording.stamping import Stamper
from ligerprof.snapshots.reader import read_snapshot
from ligerprof.snapshots.stamp import Stamp
from tests.kernels.models import tiny_model
from tests.runs.recording.operations import OperationHistory


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(hidden))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def history() -> Iterator[OperationHistory]:
    with OperationHistory() as mode:
        yield mode


def train(model: nn.Module, *, steps: int = 2, micro_batches: int = 1) -> None:
    """A loop without calls to ligerprof."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(steps):
        for _ in range(micro_batches):
            loss = torch.cosh(model(torch.ones(2, 8))).sum()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_plain_loop_is_stamped_with_phases_steps_and_modules(
    tmp_path: Path, model: Model, history: OperationHistory
) -> None:
    with running(Recorder(tmp_path, history=history)):
        train(model)

    # the loss is outside of the model but still part of forward
    assert [(stamp.step, stamp.phase) for stamp in history.stamps_of("cosh")] == [
        (1, Phase.FORWARD),
        (2, Phase.FORWARD),
    ]
    # the derivative of the loss: the first thing that backward does
    assert history.stamps_of("sinh") == [
        Stamp(step=step, phase=Phase.BACKWARD, module="loss", node="CoshBackward0") for step in (1, 2)
    ]
    tanhs = [(stamp.step, stamp.phase, stamp.module, stamp.recompute) for stamp in history.stamps_of("tanh")]
    once = [
        (Phase.FORWARD, "layers.0", False),
        (Phase.FORWARD, "layers.1", False),
        (Phase.BACKWARD, "layers.1", True),
        (Phase.BACKWARD, "layers.0", True),
    ]
    assert tanhs == [(step, *stamp) for step in (1, 2) for stamp in once]
    assert {(stamp.step, stamp.phase) for stamp in history.stamps_of("sqrt")} == {
        (1, Phase.OPTIMIZER),
        (2, Phase.OPTIMIZER),
    }
    # the second batch, made between the steps
    assert history.stamps_of("ones")[1] == Stamp(step=1, phase=Phase.OUTSIDE)


def test_what_is_recorded_is_explained(tmp_path: Path, model: Model, history: OperationHistory) -> None:
    with running(Recorder(tmp_path / "new" / "folder", history=history), model):
        train(model)

    report = explain(tmp_path / "new" / "folder")

    assert report.peak_bytes == max(history.program.allocated)
    assert list(report.phases) == list(STEP_PHASES)
    assert history.started is None


def test_saved_tensors_are_recorded_until_the_end_and_when_memory_runs_out(tmp_path: Path, model: Model) -> None:
    # the loss is the only node outside of the checkpoints
    for name, fails_at, steps in (("end", None, 2), ("failure", 40, 1)):
        history = OperationHistory(fails_at=fails_at)
        with contextlib.suppress(torch.OutOfMemoryError), history, running(Recorder(tmp_path / name, history=history)):
            train(model)
        saved = read_snapshot(tmp_path / name).saved_tensors
        kept = [(row.node, row.module) for row in saved if row.node == "CoshBackward0"]
        assert kept == [("CoshBackward0", "loss")] * steps


def test_micro_batches_belong_to_one_step(tmp_path: Path, model: Model, history: OperationHistory) -> None:
    with running(Recorder(tmp_path, history=history)):
        train(model, micro_batches=3)

    assert [stamp.step for stamp in history.stamps_of("cosh")] == [1, 1, 1, 2, 2, 2]


def test_a_loop_without_torchs_optimizers_marks_its_steps_and_phases(
    tmp_path: Path, model: Model, history: OperationHistory
) -> None:
    with running(Recorder(tmp_path, history=history), model) as recorder:
        for _ in range(2):
            with recorder.phase("forward"):
                loss = model(torch.ones(2, 8)).sum()
            loss.backward()
            with recorder.phase("optimizer"):
                for weight in model.parameters():
                    weight.data.mul_(0.5)
            recorder.step()

    assert {(stamp.step, stamp.phase) for stamp in history.stamps_of("mul_")} == {
        (1, Phase.OPTIMIZER),
        (2, Phase.OPTIMIZER),
    }
    assert [stamp.step for stamp in history.stamps_of("ones_like")] == [1, 2]


def test_an_optimizer_that_steps_inside_backward_leaves_backward_as_it_was(
    tmp_path: Path, model: Model, history: OperationHistory
) -> None:
    optimizers = {weight: torch.optim.Adagrad([weight], foreach=False) for weight in model.parameters()}
    hooks = [
        weight.register_post_accumulate_grad_hook(lambda weight: optimizers[weight].step())
        for weight in model.parameters()
    ]

    with running(Recorder(tmp_path, history=history), model):
        torch.cosh(model(torch.ones(2, 8))).sum().backward()
    # torch never frees a weight whose hook holds it, and later recordings would find its optimizer
    for hook in hooks:
        hook.remove()

    assert {stamp.phase for stamp in history.stamps_of("sqrt")} == {Phase.OPTIMIZER}
    assert {stamp.phase for stamp in history.stamps_of("tanh_backward")} == {Phase.BACKWARD}


def test_weights_made_while_recording_belong_to_the_build(tmp_path: Path, history: OperationHistory) -> None:
    with running(Recorder(tmp_path, history=history)) as recorder:
        built = Model()
        recorder.attach(built)
        train(built, steps=1)
        Model()

    phases = [stamp.phase for stamp in history.stamps_of("uniform_")]
    assert phases[:4] == [Phase.BUILD] * 4
    assert phases[4:] == [Phase.OUTSIDE] * 4


def test_everything_is_as_before_when_the_recording_is_over(
    tmp_path: Path, model: Model, history: OperationHistory
) -> None:
    backward = torch.autograd.backward
    with running(Recorder(tmp_path, history=history), model):
        assert torch.autograd.backward is not backward
        train(model, steps=1)
    noted = len(history.operations)
    text = history.text

    train(model, steps=1)

    assert torch.autograd.backward is backward
    assert (len(history.operations), history.text) == (noted, text)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def train_and_expect(path: Path, model: nn.Module) -> None:
    """Train out of memory; the file is there when the exception passes."""
    try:
        train(model)
    except torch.OutOfMemoryError:
        assert path.exists()
        raise


def train_and_fail(model: nn.Module) -> None:
    train(model, steps=1)
    raise ZeroDivisionError


def test_running_out_of_memory_leaves_a_snapshot_before_the_exception_is_raised(tmp_path: Path, model: Model) -> None:
    history = OperationHistory(fails_at=30)
    recorder = Recorder(tmp_path, history=history)
    with pytest.raises(torch.OutOfMemoryError), history, running(recorder, model):
        train_and_expect(recorder.snapshot_path, model)

    assert explain(tmp_path).peak_bytes == max(history.program.allocated)


def test_a_loop_that_goes_on_after_running_out_of_memory_is_recorded_to_its_end(tmp_path: Path, model: Model) -> None:
    history = OperationHistory(fails_at=30)
    with history, running(Recorder(tmp_path, history=history), model):
        with pytest.raises(torch.OutOfMemoryError):
            train(model)
        first = (tmp_path / "snapshot.pickle").stat().st_size
        train(model)

    assert (tmp_path / "snapshot.pickle").stat().st_size > first


def test_another_failure_leaves_a_snapshot_too(tmp_path: Path, model: Model, history: OperationHistory) -> None:
    with pytest.raises(ZeroDivisionError), running(Recorder(tmp_path, history=history), model):
        train_and_fail(model)

    assert pickle.loads((tmp_path / "snapshot.pickle").read_bytes())["device_traces"][0]


def test_a_snapshot_that_is_there_stays(tmp_path: Path, model: Model, history: OperationHistory) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_text("yesterday's")
    with pytest.raises(OutputError, match=r"snapshot\.pickle: exists"):
        Recorder(tmp_path, history=history)
    assert path.read_text() == "yesterday's"

    with running(Recorder(tmp_path, history=history, force=True), model):
        train(model, steps=1)

    assert explain(tmp_path).peak_bytes > 0


def test_a_snapshot_that_another_process_wrote_meanwhile_stays(
    tmp_path: Path, model: Model, history: OperationHistory
) -> None:
    path = tmp_path / "snapshot.pickle"
    with pytest.raises(OutputError, match="exists"), running(Recorder(tmp_path, history=history), model):
        path.write_text("another rank's")
    assert path.read_text() == "another rank's"
    assert history.started is None


def test_a_loop_that_fails_keeps_its_own_exception_where_the_disk_refuses(
    tmp_path: Path, model: Model, history: OperationHistory
) -> None:
    recorder = Recorder(tmp_path, history=history)
    recorder.snapshot_path.write_text("another rank's")

    lost = pytest.warns(UserWarning, match="the recording is lost")
    with lost, pytest.raises(ZeroDivisionError), running(recorder, model):
        train_and_fail(model)


def test_settings_reach_the_allocator(tmp_path: Path, history: OperationHistory) -> None:
    with running(Recorder(tmp_path, history=history, stacks="all", max_entries=7)):
        assert history.started == {"max_entries": 7, "stacks": "all"}


def test_a_recording_inside_another_one_is_an_error(tmp_path: Path, history: OperationHistory) -> None:
    with running(Recorder(tmp_path, history=history)), pytest.raises(LigerprofError, match="is recorded already"):
        Stamper(lambda _text: None).open()


def test_unknown_phase_and_a_recorder_that_is_closed_are_errors(tmp_path: Path, history: OperationHistory) -> None:
    sideways = pytest.raises(LigerprofError, match=r"unknown phase 'sideways'\. Known: build, forward")
    with running(Recorder(tmp_path, history=history)) as recorder, sideways:
        recorder.phase("sideways").__enter__()
    with pytest.raises(LigerprofError, match="the recording has ended"):
        recorder.step()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_there_is_one_clear_error_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match="no CUDA device to record"):
        ligerprof.record(tmp_path / "out").__enter__()
    assert not (tmp_path / "out").exists()


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, ligerprof; sys.exit('torch' in sys.modules or 'record' not in ligerprof.__all__)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_trainers_callback_records_training(tmp_path: Path, model: Model, history: OperationHistory) -> None:
    from transformers import Trainer, TrainingArguments

    from ligerprof.runs.recording.trainer_callback import RecordCallback

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.cosh(self.inner(hidden)).sum()}

    arguments = TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    batches = [{"hidden": torch.ones(8)}] * 8
    callback = RecordCallback(tmp_path / "out", history=history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(WithLoss(), arguments, train_dataset=batches, callbacks=[callback]).train()

    assert [stamp.step for stamp in history.stamps_of("cosh")] == [1, 1, 2, 2]
    assert {stamp.module for stamp in history.stamps_of("tanh")} == {"inner.layers.0", "inner.layers.1"}
    assert list(explain(tmp_path / "out").phases) == list(STEP_PHASES)


def cuda_model() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()


@pytest.fixture
def empty_cuda() -> None:
    """A device without what earlier tests and cuBLAS left there."""
    clear_cuda()
    assert torch.cuda.memory_allocated() == 0


def clear_cuda() -> None:
    gc.collect()
    bindings: Any = torch._C
    bindings._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def train_on_cuda(model: nn.Module, batch: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(batch, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.gpu
@pytest.mark.usefixtures("empty_cuda")
@pytest.mark.parametrize("stacks", ["python", "all"])
def test_cuda_peak_is_the_counters(tmp_path: Path, stacks: Any) -> None:
    torch.cuda.reset_peak_memory_stats()
    with ligerprof.record(tmp_path, stacks=stacks):
        train_on_cuda(cuda_model(), 4096)
    measured = torch.cuda.max_memory_allocated()

    report = explain(tmp_path)

    assert report.peak_bytes == measured
    assert report.complete
    assert list(report.phases) == list(STEP_PHASES)
    assert report.roles[ligerprof.Role.UNATTRIBUTED] < 0.02 * measured


def build_and_train(recorder: Recorder, batch: int) -> None:
    model = cuda_model()
    recorder.attach(model)
    train_on_cuda(model, batch)


@pytest.mark.gpu
@pytest.mark.usefixtures("empty_cuda")
def test_cuda_out_of_memory_leaves_a_snapshot_of_the_memory(tmp_path: Path) -> None:
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2**30 / total_bytes)
    try:
        with pytest.raises(torch.OutOfMemoryError), ligerprof.record(tmp_path) as recorder:
            build_and_train(recorder, 2**17)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

    report = explain(tmp_path)

    failure = report.out_of_memory
    assert failure is not None
    assert failure.roles.total_bytes == failure.allocated_bytes
    assert failure.roles[ligerprof.Role.PARAMETERS] == sum(
        weight.nbytes for weight in nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 1024)).parameters()
    )
    assert failure.roles[ligerprof.Role.INPUTS] == 2**17 * 1024 * 4


@pytest.mark.gpu
def test_history_of_cuda_is_off_afterwards(tmp_path: Path) -> None:
    with running(Recorder(tmp_path, history=CudaHistory())):
        torch.ones(1, device="cuda")
    torch.ones(1, device="cuda")
    assert not any(torch.cuda.memory._snapshot()["device_traces"])


@pytest.mark.gpu
@pytest.mark.usefixtures("empty_cuda")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_later_steps_have_the_roles_that_hooks_on_all_nodes_give(tmp_path: Path, checkpointing: bool) -> None:
    def roles(stacks: Any) -> dict[tuple[Any, ...], int]:
        # the workspaces of a recording before are older than this one
        clear_cuda()
        model = tiny_model("llama", hidden_size=240, vocab_size=8192, device="cuda")
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        tokens = torch.randint(0, 8192, (4, 64), device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with ligerprof.record(tmp_path / stacks, model=model, stacks=stacks):
            for _ in range(4):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        peak = explain(tmp_path / stacks, step=4)
        found: Counter[tuple[Any, ...]] = Counter()
        for group in peak.blocks:
            # C++ frames name operators, so that they divide the blocks of a module; a workspace belongs to a thread
            module = "" if group.role is Role.LIBRARY_WORKSPACE else group.module
            found[group.role, module, group.layer] += group.size_bytes
        return dict(found)

    assert roles("all") == roles("python")
