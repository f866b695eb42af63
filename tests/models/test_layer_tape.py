"""Tapes of decoder layers as data: which layers have one, and what a tape consists of."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from ligerprof.errors import UnsupportedError
from ligerprof.models import ARCHITECTURES, CONFIGS, spec_from_config
from ligerprof.models.layer_tape import (
    LOOPS,
    Batch,
    Step,
    attention_tape,
    experts_tape,
    layer_tape,
    mask_kind,
    mask_tape,
    masks_of,
    tapes_of,
    unrolled,
)

MIXTURES = {name: row.mlp.experts for name, row in ARCHITECTURES.items() if row.mlp.experts is not None}


def test_each_layer_of_the_catalog_has_a_tape() -> None:
    for name in CONFIGS:
        spec = spec_from_config(CONFIGS[name], name=name)
        for index in spec.layer_kinds.examples if not spec.architecture.streams else ():
            for batch in (Batch(rows=1, tokens=4096), Batch(rows=4, tokens=100, wide=True)):
                assert layer_tape(spec, index, batch)[-1][0] == "output", name


def test_each_model_of_the_catalog_has_tapes_of_eager_attention_and_masks() -> None:
    for name in CONFIGS:
        spec = spec_from_config(CONFIGS[name], name=name)
        if spec.architecture.streams:
            continue
        for rows, apart in product((1, 4), (False, True)):
            steps = attention_tape(spec, rows, apart=apart)
            assert sum(step[0] == "product of values" for step in steps) == 2, name
            assert len(steps[-1][1]) == 2, name
        functions = masks_of(spec)
        assert functions, name
        for function, hides, eager in product(functions.values(), ("", "padding", "documents"), (False, True)):
            makes = bool(mask_tape(function, mask_kind(hides=hides, filled=False, eager=eager))[-1][1])
            assert makes == (eager or bool(hides)), name


@pytest.mark.parametrize("model_type", [name for name, row in ARCHITECTURES.items() if not row.streams])
def test_a_tape_reads_what_is_there(model_type: str) -> None:
    """Each value is made once, read while a variable or a view holds it, and dropped at most once."""
    for (kind, tape), chunks in product(tapes_of(model_type), range(LOOPS, LOOPS + 3)):
        check(list(unrolled(tape, chunks)), {0}, kind)


def check(steps: Sequence[Step], given: set[int], kind: Sequence[str]) -> None:
    made, dropped = set(given), set[int]()
    for name, results, *rest in steps[:-1]:
        if name == "drop":
            assert results in made - dropped, kind
            dropped.add(results)
            continue
        numbers = {item for item in rest[0] if isinstance(item, int)}
        assert numbers <= made - dropped, (kind, name)
        # what the steps after them make
        if name not in ("gated", "rotate"):
            made |= {results} if isinstance(results, int) else set(results)
    outputs = steps[-1][1]
    assert ({outputs} if isinstance(outputs, int) else set(outputs)) <= made - dropped


@pytest.mark.parametrize("model_type", [name for name, experts in MIXTURES.items() if not experts.multiplies_all])
def test_experts_run_one_after_another(model_type: str) -> None:
    """Each has its own tokens, and reads and drops what is there, however many there are."""
    for routed in ((5,), (5, 7), (9, 4, 8, 6)):
        steps = experts_tape(model_type, routed)
        check(steps, {0, 1, 2}, [model_type])
        assert [step[4] for step in steps if step[0] == "index" and step[2][0] == 2] == [[tokens] for tokens in routed]
        assert sum(step[0] == "part" and step[2] == ["p:down_proj"] for step in steps) == len(routed)
        assert ["drop", 3] not in steps


def test_a_mask_of_experts_has_the_classes_that_the_code_gives_it() -> None:
    """One more than there are experts, for choices of none; GPT-OSS's has none of them."""
    masks = {name: experts_tape(name, (5, 7))[1][3] for name in ("mixtral", "gpt_oss")}
    assert masks == {"mixtral": ["batch", "chosen", "classes"], "gpt_oss": ["batch", "chosen", "every"]}


def test_a_layer_that_was_not_recorded_is_an_error() -> None:
    spec = spec_from_config(CONFIGS["llama3.2-1b"], name="own")
    fewer = tuple(item for item in spec.parameters if not item.name.endswith("q_proj.weight"))
    with pytest.raises(UnsupportedError, match=r"own has layers of a kind that was not recorded \(rotated, input_"):
        layer_tape(replace(spec, parameters=fewer), 0, Batch())
