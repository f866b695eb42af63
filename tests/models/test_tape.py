"""Tapes as data: written and read again, cached by what decides them, and never trusted."""

from pathlib import Path

import pytest

from ligerprof.models.tape import POWERS, Tape, TapeParameter, Unit
from ligerprof.models.tape_cache import cache_key, find_tape, keep_tape
from ligerprof.roles import Role


def tape(*, batch: tuple[int, int] = (2, 8), seq: tuple[int, int] = (128, 1024)) -> Tape:
    bytes_per_token = (1, *(12 if power == (1, 1) else 0 for power in POWERS))
    layer = Unit(
        forward=(("enter", ((-1, 0),)), ("take", 0, Role.ACTIVATIONS), ("save", 3, 0), ("leave",), ("drop", (-1, 0))),
        backward=(("start", 3), ("take", 0, Role.GRADIENTS), ("release", 3), ("arrive", "{}.weight", 1)),
        graph=(),
    )
    outer = Unit(forward=(("take", 0, Role.ACTIVATIONS),), backward=(), graph=())
    return Tape(
        polynomials=(bytes_per_token, (2, *(0,) * 5, 1)),
        scratches=(("softmax", ("list", ("number", 0), ("is", "float32"), ("is", "bfloat16")), ()),),
        units=(outer, layer),
        order=(0, 1, 1, 0),
        layers=("layers.0", "layers.1"),
        numbers=(0, 1),
        parameters=tuple(
            TapeParameter(name=f"layers.{index}.weight", shape=(3, 4), width=2, trained=True) for index in range(2)
        ),
        built=(24, 8, -2),
        buffers=(8,),
        attention=("cudnn",),
        workspaces={"forward": 1, "backward": 2, "recomputed": 3},
        batch=batch,
        seq=seq,
        multiple=128,
    )


def test_reads_what_it_wrote() -> None:
    assert Tape.loads(tape().dumps()) == tape()


def test_values_are_polynomials_of_batch_and_tokens() -> None:
    assert tape().values(3, 128) == [12 * 3 * 128, 3 * 128 * 128 // 2]


def test_covers_the_sizes_between_the_traced_ones() -> None:
    assert tape().covers(5, 384)
    assert not tape().covers(5, 320)
    assert not tape().covers(1, 384)
    assert not tape().covers(5, 2048)


def test_a_layer_that_frees_what_a_distant_one_made_stands_for_no_other() -> None:
    assert tape().kinds == (1, 1)
    distant = Unit(forward=(("drop", (-2, 0)),), backward=(), graph=())
    assert len(set(Tape(**{**vars(tape()), "units": (tape().units[0], distant)}).kinds)) == 2


def test_the_cache_finds_the_tape_that_covers_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = cache_key({"config": "{}", "options": {"precision": "bf16"}})
    assert find_tape(key, 4, 256) is None
    keep_tape(key, tape())
    keep_tape(key, tape(batch=(1, 1)))
    assert find_tape(key, 4, 256) == tape()
    assert find_tape(key, 1, 256) == tape(batch=(1, 1))
    assert find_tape(cache_key({"config": "{}", "options": {"precision": "fp32"}}), 4, 256) is None


@pytest.mark.parametrize("content", [b"", b"not a tape", b"\x00" * 100])
def test_a_damaged_file_is_passed_over(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_tape("key", tape())
    (path,) = (tmp_path / "ligerprof" / "tapes").iterdir()
    for damaged in (content, path.read_bytes()[:-40]):
        path.write_bytes(damaged)
        assert find_tape("key", 4, 256) is None
