"""Tapes of decoder layers are what transformers' code does now."""

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.pool import Pool

import pytest
from packaging.version import Version

from benchmarks.layer_models import ROWS, TOKENS, SmallModel
from benchmarks.layer_tapes import attention, configs_of, functions, masks, plain
from ligerprof.models import ModelSpec, spec_from_config
from ligerprof.models.layer_tape import (
    Batch,
    Step,
    attention_tape,
    experts_tape,
    function_tape,
    in_turn,
    layer_kind,
    layer_tape,
    mask_tape,
    norm_tape,
)
from ligerprof.models.mixers import CHUNK_TOKENS
from tests.sampling import sampled

BATCH = Batch(rows=ROWS, tokens=TOKENS)

pytestmark = [
    pytest.mark.usefixtures("no_log_records"),
    pytest.mark.skipif(Version(version("transformers")) < Version("5.23"), reason="the version that was recorded"),
]


@pytest.mark.parametrize("model_type", ["llama", "phi3", "stablelm", "deepseek_v2", "lfm2"])
def test_a_layer_is_recorded_again(model_type: str) -> None:
    spec = spec_from_config(next(configs_of(model_type)), name=model_type)
    model = SmallModel(spec)
    kinds = {str(layer_kind(spec, index, BATCH)): index for index in range(spec.layers)}
    for index in kinds.values():
        assert model.record(index, BATCH.rows, BATCH.tokens) == layer_tape(spec, index, BATCH)


@pytest.fixture(scope="module")
def process() -> Iterator[Pool]:
    """One in which no other test ran.

    After a graph break with `fullgraph`, which a check of kernels looks for, torch leaves its frame evaluator in place.
    Python's callers then hold their arguments until a function returns, and tensors of the scan end later.
    """
    with get_context("spawn").Pool(1) as pool:
        yield pool


def recorded_scan(rows: int, tokens: int) -> Sequence[Step]:
    return SmallModel(scanned()).record(0, rows, tokens)


def scanned() -> ModelSpec:
    return spec_from_config(next(configs_of("falcon_h1")), name="falcon_h1")


@sampled("chunks", [1, 5], every=2)
@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_scan_is_recorded_again(process: Pool, rows: int, chunks: int) -> None:
    spec = scanned()
    assert spec.state_space is not None
    batch = Batch(rows=rows, tokens=chunks * spec.state_space.chunk)
    assert process.apply(recorded_scan, (batch.rows, batch.tokens)) == layer_tape(spec, 0, batch)


@pytest.mark.slow
def test_a_loop_over_chunks_of_tokens_is_recorded_again() -> None:
    spec = spec_from_config(next(configs_of("qwen3_5_text")), name="qwen3_5_text")
    batch = Batch(rows=1, tokens=5 * CHUNK_TOKENS)
    assert SmallModel(spec).record_loop(0, batch.rows, CHUNK_TOKENS, 0) == layer_tape(spec, 0, batch)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_experts_in_turn_are_recorded_again(model_type: str) -> None:
    spec = spec_from_config(next(configs_of(model_type)), name=model_type)
    recorded = SmallModel(spec).record_experts(spec.layer_kinds.sparse.index(True))
    assert list(in_turn(recorded, (5, 7, 9))) == experts_tape(model_type, (5, 7, 9))


@pytest.mark.parametrize("model_type", ["gemma", "gpt2", "nemotron", "olmo"])
def test_a_norm_is_recorded_again(model_type: str) -> None:
    spec = spec_from_config(next(configs_of(model_type)), name=model_type)
    assert SmallModel(spec).record_norm() == norm_tape(spec)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "gpt_oss", "llama4_text"])
def test_eager_attention_is_recorded_again(model_type: str) -> None:
    spec = spec_from_config(next(configs_of(model_type)), name=model_type)
    recorded = list(attention(SmallModel(spec), spec))
    assert recorded
    for heads, rows, apart, tape in recorded:
        assert tape == attention_tape(heads, rows, apart=apart)


def test_masks_are_recorded_again() -> None:
    for name, tapes in masks(plain()):
        assert tapes == {kind: mask_tape(name, kind) for kind in tapes}


def test_references_of_kernels_are_recorded_again() -> None:
    recorded = dict(functions())
    assert {"rms_norm", "rope", "rope fp32"} <= recorded.keys()
    assert recorded == {name: function_tape(name) for name in recorded}
