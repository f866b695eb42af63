"""Caches of a generation in programs that no recording covers."""

import pytest

from ligerprof.roles import Role
from tests.analyzers.attribution.recording import KIB, Recording

LAYERS, PASSES = 3, 4
MAIN = [("serve.py", 90, "main"), ("serve.py", 99, "<module>")]
LAYER = [("model.py", 20, "forward"), ("model.py", 50, "forward"), *MAIN]


def generate(*, at_once: bool) -> list[Role]:
    """Roles of what each layer replaces by a larger block in every pass, at once or when the pass has ended."""
    recording = Recording()
    kept: list[tuple[int, int]] = []
    for tokens in range(PASSES):
        made = []
        for layer in range(LAYERS):
            made.append(recording.alloc((32 + tokens) * KIB, LAYER))
            if kept and at_once:
                recording.free(kept[layer])
        if kept and not at_once:
            for block in kept:
                recording.free(block)
        kept = made
        recording.free(recording.alloc(KIB, MAIN))
    return [role for role in recording.roles() if role is not Role.ACTIVATIONS]


def test_what_each_layer_replaces_by_a_larger_block_is_cached() -> None:
    assert generate(at_once=True).count(Role.KV_CACHE) == LAYERS * PASSES


def test_outputs_of_layers_that_a_pass_returns_are_not_cached() -> None:
    assert Role.KV_CACHE not in generate(at_once=False)


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        (["setup_caches"], Role.KV_CACHE),
        (["__init__", "allocate_kv_cache"], Role.KV_CACHE),
        (["build_rope_cache"], Role.INPUTS),
        (["cached_batches"], Role.INPUTS),
    ],
)
def test_tensors_of_a_function_named_after_a_cache_are_cached(functions: list[str], expected: Role) -> None:
    recording = Recording()
    for _ in range(2 * LAYERS):
        recording.alloc(16 * KIB, [*(("model.py", 7, name) for name in functions), *MAIN])
    for _ in range(2):
        recording.free(recording.alloc(KIB, LAYER))
        recording.free(recording.alloc(KIB, MAIN))

    assert set(recording.roles()[: 2 * LAYERS]) == {expected}
