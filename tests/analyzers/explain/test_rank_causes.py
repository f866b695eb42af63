from dataclasses import replace
from pathlib import Path

from ligerprof.analyzers.explain.ranks import CauseKind, ModuleWeights, RankPeak, causes
from ligerprof.roles import Role
from tests.analyzers.explain.test_diff import MIB, group, report

LAYER = {"layers.*.mlp": ModuleWeights(2, 8 * MIB)}


def rank(number: int, *blocks: object, **weights: ModuleWeights) -> RankPeak:
    named = {name.replace("_", "."): held for name, held in weights.items()}
    return RankPeak(rank=number, source=Path("snapshot.pickle"), report=report(*blocks), weights=LAYER | named)  # type: ignore[arg-type]


def kept(count: int, each_bytes: int, operation: str = "") -> object:
    block = group(count * each_bytes, "layers.0.mlp", "model.py:3 forward", layer=0, count=count)
    return replace(block, operation=operation, kept_by="SiluBackward0")


def test_a_stage_has_the_head_and_what_its_passes_keep() -> None:
    head = group(64 * MIB, "head", "model.py:9 forward")
    (cause,) = causes(rank(1, head, kept(1, MIB), head=ModuleWeights(1, 4 * MIB)), rank(0, kept(1, MIB)))
    assert (cause.kind, cause.size_bytes, cause.modules) == (CauseKind.MODULES, 68 * MIB, ("head",))
    assert cause.text == "has head, 4.0 MiB of weights and 64.0 MiB of activations"


def test_equal_blocks_that_a_layer_keeps_more_often_are_of_more_micro_batches() -> None:
    # the recording of one rank names the operation
    (cause,) = causes(rank(0, kept(4, MIB, "silu")), rank(3, kept(1, MIB)))
    assert (cause.kind, cause.size_bytes, cause.modules) == (CauseKind.MICRO_BATCHES, 3 * MIB, ("layers.*.mlp",))
    assert "4 instead of 1 blocks" in cause.text


def test_as_many_but_larger_blocks_are_no_micro_batches() -> None:
    (cause,) = causes(rank(0, kept(2, 3 * MIB)), rank(1, kept(2, MIB)))
    assert (cause.kind, cause.size_bytes) == (CauseKind.SIZES, 4 * MIB)


def test_more_layers_and_larger_shards_are_told_apart() -> None:
    lowest = RankPeak(
        rank=1,
        source=Path("snapshot.pickle"),
        report=report(),
        weights={"layers.*.mlp": ModuleWeights(1, 4 * MIB), "embedding": ModuleWeights(1, 3 * MIB)},
    )
    found = causes(rank(0, embedding=ModuleWeights(1, 4 * MIB)), lowest)
    assert [(cause.kind, cause.size_bytes) for cause in found] == [
        (CauseKind.LAYERS, 4 * MIB),
        (CauseKind.SHARDS, MIB),
    ]
    assert found[0].text == "has 2 instead of 1 of layers.*, 4.0 MiB of weights"


def test_the_loss_is_where_logits_are_and_equal_ranks_have_no_cause() -> None:
    logits = group(5 * MIB, role=Role.LOGITS)
    (cause,) = causes(rank(0, logits), rank(1))
    assert (cause.kind, cause.size_bytes) == (CauseKind.LOSS, 5 * MIB)
    assert causes(rank(0, logits, kept(2, MIB)), rank(1, logits, kept(2, MIB))) == ()
