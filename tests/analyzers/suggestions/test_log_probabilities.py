"""Log-probabilities without logits are suggested for losses that pick labels' log-probabilities, and for no others."""

from functools import cache

import pytest

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.analyzers.suggestions.fused_loss import LOSS_ROLES
from ligerprof.analyzers.suggestions.rows import Basis
from tests.paths import PROGRAMS


@cache
def report(name: str) -> PeakReport:
    return analyze(PROGRAMS / f"{name}.pickle.xz").peak


@pytest.mark.parametrize("name", ["dpo", "grpo-bf16"])
def test_the_saving_is_part_of_the_losses_tensors(name: str) -> None:
    found = report(name)
    of_loss = sum(found.roles[role] for role in LOSS_ROLES)

    (one,) = [each for each in found.suggestions if each.name == "label-logits"]

    assert one.saves_bytes is not None
    assert of_loss / 2 < one.saves_bytes <= of_loss
    assert one.basis is Basis.ESTIMATED
    assert "fused-loss" not in {each.name for each in found.suggestions}


# a divergence of two distributions needs all logits; torch's cross-entropy has a fused loss; a classifier of images
@pytest.mark.parametrize("name", ["distillation", "muon", "vit", "gan"])
def test_other_losses_have_no_such_suggestion(name: str) -> None:
    assert "label-logits" not in {one.name for one in report(name).suggestions}
