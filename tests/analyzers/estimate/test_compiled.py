"""The estimate of a step under torch.compile: that of the step without it, and no verdict."""

from ligerprof.analyzers.estimate import estimate, judged
from ligerprof.recipe.training import TrainingRecipe


def test_a_compiled_step_is_estimated_as_without_compilation_and_not_judged() -> None:
    compiled, plain = (
        TrainingRecipe(model="tiny", compile=compiles, memory_limit_bytes=2**20) for compiles in (True, False)
    )
    estimated = judged(estimate(compiled), by_gpu=True)

    assert estimated.peak_bytes == estimate(plain).peak_bytes
    assert (estimated.gpu, estimated.verdict) == (None, None)
    assert estimated.to_json()["fits"] is None
    assert set(estimated.left_out) - set(estimate(plain).left_out) == {
        text for text in estimated.left_out if "torch.compile" in text
    }
    assert any("torch.compile" in text for text in estimated.left_out)
