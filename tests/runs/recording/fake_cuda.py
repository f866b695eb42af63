"""Pretends that a CUDA device is used, in a process whose door is open: each operation on the CPU allocates there."""

import io
from typing import Any

import torch

from ligerprof.runs.recording import record
from tests.runs.recording.operations import OperationHistory


def initialize(fails_at: int | None = None) -> OperationHistory:
    """What torch.cuda does on its first use: run the calls that were queued for it."""
    history = OperationHistory(fails_at=fails_at)

    class Pretended(record.CudaHistory):
        def __new__(cls) -> Any:
            return history

    pretended: Any = record
    pretended.CudaHistory = Pretended
    torch.cuda.memory._record_memory_history = lambda *_arguments, **_named: None
    for queued, _traceback in torch.cuda._queued_calls[2:]:
        queued()
    history.__enter__()
    return history


def train(steps: int = 3, width: int = 8) -> None:
    """A loop with an evaluation and a checkpoint, which knows nothing of a recording."""
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(steps):
        model(torch.ones(2, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(torch.ones(4, width))
    # as a sharded model gathers its weights
    model.register_state_dict_post_hook(lambda _model, state, *_: state.update({key: state[key] + 0 for key in state}))
    torch.save(model.state_dict(), io.BytesIO())
