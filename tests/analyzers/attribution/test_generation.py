"""Caches of a generation in programs that no recording covers."""

from typing import Any

import numpy as np
import pytest

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.roles import Role
from ligerprof.snapshots.reader import Snapshot

KIB = 2**10
LAYERS, PASSES = 3, 4
MAIN = [("serve.py", 90, "main"), ("serve.py", 99, "<module>")]
LAYER = [("model.py", 20, "forward"), ("model.py", 50, "forward"), *MAIN]


class Recording:
    """Allocations one after another, each at its own address in one segment."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._frames: dict[tuple[tuple[str, int, str], ...], list[dict[str, Any]]] = {}
        self._address = 2**40
        self._add("segment_alloc", self._address, 1024 * 1024 * KIB, MAIN)

    def alloc(self, size: int, calls: list[tuple[str, int, str]]) -> tuple[int, int]:
        block = self._address, size
        self._address += 64 * KIB
        self._add("alloc", *block, calls)
        return block

    def free(self, block: tuple[int, int]) -> None:
        for action in ("free_requested", "free_completed"):
            self._add(action, *block, [])

    def roles(self) -> list[Role]:
        """The role of each allocated block."""
        found = analyze(Snapshot.from_dict({"device_traces": [self.events], "segments": []}))
        return found.attribution.roles_of(np.arange(len(found.replayed.requested_bytes)), found.peak_moment)

    def _add(self, action: str, address: int, size: int, calls: list[tuple[str, int, str]]) -> None:
        # as torch writes them, events of one place share their frames
        frames = self._frames.setdefault(
            tuple(calls), [{"filename": file, "line": line, "name": name} for file, line, name in calls]
        )
        self.events.append({"action": action, "addr": address, "size": size, "frames": frames, "stream": 0})


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
