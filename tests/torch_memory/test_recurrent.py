"""cuDNN's recurrent layers: the rules against layers that an H200 measured."""

import json

from ligerprof.torch_memory.libraries import RecurrentLayers, spaces
from tests.paths import REPOSITORY


def test_reserve_spaces_are_the_measured_ones() -> None:
    rows = [
        json.loads(line) for line in (REPOSITORY / "benchmarks/results/recurrent-h200.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 78
    for row in rows:
        assert spaces(RecurrentLayers(**row["layers"]), train=True)[1] == row["reserve_bytes"]
