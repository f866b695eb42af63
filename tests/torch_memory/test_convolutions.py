"""cuDNN's workspaces: the rules against convolutions that an H200 recorded."""

import json
import re
from collections.abc import Iterator
from math import prod

import pytest

from ligerprof.torch_memory.libraries import Convolution
from tests.paths import REPOSITORY

NAME = re.compile(r"conv(\d)d ([\d,]+)->(\d+) k(\S+?)s(\S+?)p(\S+?)d(\d+)g(\d+) (\w+)( cl)?")


def measured(*dimensions: int) -> Iterator[tuple[Convolution, tuple[int, int, int], int]]:
    """Each convolution, the workspaces of its three kernels, and the bytes that it reads and writes."""
    for line in (REPOSITORY / "benchmarks/results/convolutions-h200.jsonl").read_text().splitlines():
        row = json.loads(line)
        found = NAME.fullmatch(row["convolution"])
        if found is None or int(found[1]) not in dimensions:
            continue
        batch, inner, *before = map(int, found[2].split(","))
        outer, dilation, groups = int(found[3]), int(found[7]), int(found[8])
        kernel, stride, padding = (
            [int(size) for size in text.strip("()").split("x")] * (1 if "x" in text else len(before))
            for text in found.groups()[3:6]
        )
        width = 4 if found[9] == "float32" else 2
        sides = [
            (side + 2 * pad - dilation * (size - 1) - 1) // step + 1
            for side, size, step, pad in zip(before, kernel, stride, padding, strict=True)
        ]
        problem = Convolution(
            source=(batch, inner, *before),
            weight=(outer, inner // groups, *kernel),
            result=(batch, outer, *sides),
            stride=stride,
            groups=groups,
            width=width,
            channels_last=found[10] is not None,
        )
        source, weight, result = (prod(shape) * width for shape in (problem.source, problem.weight, problem.result))
        backward = row["backward"]
        workspaces = (after(row["forward"], result), after(backward, source), after(backward, weight))
        yield problem, workspaces, source + weight + result


def after(events: list[int], size: int) -> int:
    """The block that is allocated and freed right after one of a size."""
    found = [index for index, event in enumerate(events) if event == size]
    following = events[found[-1] + 1 : found[-1] + 3] if found else []
    return following[0] if len(following) == 2 and sum(following) == 0 and following[0] > 0 else 0


@pytest.mark.parametrize(("dimensions", "count", "least"), [((2,), 348, 0.7), ((1, 3), 441, 0.6)])
def test_most_workspaces_are_close_to_the_measured_ones(dimensions: tuple[int, ...], count: int, least: float) -> None:
    close = total = 0
    for problem, (forward, gradient, weight), moved_bytes in measured(*dimensions):
        ours = (
            problem.forward_bytes(),
            problem.forward_bytes(is_gradient=True),
            problem.weight_gradient_bytes(),
        )
        for workspace, mine in zip((forward, gradient, weight), ours, strict=True):
            close += abs(workspace - mine) <= 0.05 * moved_bytes
            total += 1
    assert total == count
    assert close / total > least
