"""TRL's function for log-probabilities, replaced by the fused loss, against plain torch; TRL itself is a stand-in."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import ligerprof.kernels
from ligerprof.errors import KernelInputError, KernelUnavailableError
from tests.kernels.oracle import LOSS_ROUNDINGS, leaves, relative_error

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
OF_TRL = SimpleNamespace(apply=None)


class DPOTrainer:
    """Has the name of TRL's."""


class OwnTrainer(DPOTrainer):
    pass


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = {name: ModuleType(name) for name in ("trl", "trl.trainer", "trl.trainer.utils")}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    made["trl.trainer.utils"]._ChunkedLogProbFunction = OF_TRL  # type: ignore[attr-defined]
    return made["trl.trainer.utils"]


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_trainers_log_probabilities(softcap: float | None, utils: ModuleType, device: torch.device) -> None:
    x, w, b = (torch.randn(*size, device=device) for size in ((9, 24), (150, 24), (150,)))
    y = torch.randint(0, 150, (9,), device=device)
    grads = torch.randn(2, 9, device=device)
    given = leaves(x, w, b)
    with ligerprof.kernels.apply(OwnTrainer(), "dpo"):
        found = utils._ChunkedLogProbFunction.apply(*given, y, 0.8, 32768, softcap, 1.3, OUTPUTS)
        alone = utils._ChunkedLogProbFunction.apply(x, w, None, y, 1.0, 32768, None, 1.0, ())
    assert utils._ChunkedLogProbFunction is OF_TRL
    made = torch.autograd.grad(found[:2], given, list(grads))
    exact = leaves(*(value.double() for value in (x, w, b)))

    def scored(z: Tensor, label: Tensor) -> tuple[Tensor, ...]:
        log_p = z.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        own = log_p.gather(-1, label[:, None])[:, 0]
        return own, entropy, (2 * log_p).logsumexp(-1), z.mean(-1), z.argmax(-1) == label

    z = 1.3 * (exact[0] @ exact[1].t() + exact[2])
    truth = scored((z if softcap is None else softcap * torch.tanh(z / softcap)) / 0.8, y)
    right = torch.autograd.grad(truth[:2], exact, list(grads.double()))
    for one, other in zip((*found[:4], *made), (*truth[:4], *right), strict=True):
        assert relative_error(one, other) < 3 * LOSS_ROUNDINGS[torch.float32]
    assert found[4].dtype == torch.bool
    assert torch.equal(found[4], truth[4])
    assert alone[1:] == (None,) * 4
    assert relative_error(alone[0], scored(x.double() @ w.double().t(), y)[0]) < 1e-5


def test_what_is_no_trainer_of_the_objective_is_refused(utils: ModuleType) -> None:
    with pytest.raises(KernelInputError, match="Give TRL's GRPOTrainer"):
        ligerprof.kernels.apply(DPOTrainer(), "grpo")
    first, second = (ligerprof.kernels.apply(DPOTrainer(), "dpo") for _ in range(2))
    with pytest.raises(KernelInputError, match="Undo the later patch first"):
        first.undo()
    second.undo()
    first.undo()
    assert utils._ChunkedLogProbFunction is OF_TRL
    patched = ligerprof.kernels.apply(DPOTrainer(), "dpo")
    gathered = torch.randn(5, 4)
    gathered.ds_id = 0  # type: ignore[attr-defined]
    with pytest.raises(KernelInputError, match="Use ZeRO-2"):
        utils._ChunkedLogProbFunction.apply(torch.randn(2, 4), gathered, None, torch.zeros(2).long(), 1.0, 1)
    patched.undo()
    del utils._ChunkedLogProbFunction
    with pytest.raises(KernelUnavailableError, match=r"TRL 1\.16 has it"):
        ligerprof.kernels.apply(DPOTrainer(), "dpo")
