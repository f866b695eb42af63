"""`kernels check` of objectives: right ones pass, and a wrong formula fails."""

import dataclasses

import pytest
from torch import Tensor

from ligerprof.errors import UnknownKernelError
from ligerprof.runs.kernel_check import Result, check, check_kernel, find_checked
from tests.kernels.conftest import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
_TITLES = ("fp32", "fp16", "bf16", "frozen weights")


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CASES", [case for case in check.CASES if case.title in _TITLES])
    # nothing is simulated
    monkeypatch.setattr(check, "worker", lambda: None)


@pytest.mark.parametrize("name", ["gspo", "jsd"])
def test_objectives_pass(name: str) -> None:
    found = check_kernel(find_checked(name, "ligerprof"))
    results = {row.case: row.result for row in found.rows if row.case in _TITLES}
    assert results.pop("fp16") is (Result.SKIP if name == "jsd" else Result.PASS)
    assert set(results.values()) == {Result.PASS}


def test_a_wrong_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from ligerprof.kernels.objectives import loss

    run = loss.gradient_of_words

    def wrong(arguments: object, *args: Tensor, **kwargs: int) -> None:
        half = dataclasses.replace(arguments, scale=arguments.scale / 2)  # type: ignore[attr-defined,type-var]
        run(half, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loss, "gradient_of_words", wrong)
    found = check_kernel(find_checked("dr_grpo", "ligerprof"))
    assert {row.tensor for row in found.rows if row.result is Result.FAIL} <= {"d_hidden", "d_weight"}
    assert not found.passed


def test_other_names_are_the_registrys() -> None:
    assert find_checked("rms", "torch").provider == "torch"
    with pytest.raises(UnknownKernelError):
        find_checked("dpo", "torch")
