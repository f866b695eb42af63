"""cuDNN's workspaces: the rules against convolutions that an H200 recorded."""

import json
import re
from collections.abc import Iterator

from ligerprof.torch_memory.convolutions import Convolution
from tests.paths import REPOSITORY

NAME = re.compile(r"conv2d (\d+),(\d+),(\d+),(\d+)->(\d+) k(\d+)s(\d+)p(\d+)d(\d+)g(\d+) (\w+)( cl)?")


def measured() -> Iterator[tuple[Convolution, tuple[int, int, int], int]]:
    """Each convolution, the workspaces of its three kernels, and the bytes that it reads and writes."""
    for line in (REPOSITORY / "benchmarks/results/convolutions-h200.jsonl").read_text().splitlines():
        row = json.loads(line)
        found = NAME.fullmatch(row["convolution"])
        if found is None:
            continue
        batch, inner, high, wide, outer, kernel, stride, padding, dilation, groups = map(int, found.groups()[:10])
        width = 4 if found[11] == "float32" else 2
        sides = [(side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for side in (high, wide)]
        problem = Convolution(
            source=(batch, inner, high, wide),
            weight=(outer, inner // groups, kernel, kernel),
            result=(batch, outer, *sides),
            stride=(stride, stride),
            groups=groups,
            width=width,
            channels_last=found[12] is not None,
        )
        sizes = [batch * inner * high * wide, outer * inner // groups * kernel**2, batch * outer * sides[0] * sides[1]]
        source, weight, result = (size * width for size in sizes)
        backward = row["backward"][1:]
        workspaces = (after(row["forward"], result), after(backward, source), after(backward, weight))
        yield problem, workspaces, source + weight + result


def after(events: list[int], size: int) -> int:
    """The block that is allocated and freed right after one of a size."""
    found = [index for index, event in enumerate(events) if event == size]
    following = events[found[-1] + 1 : found[-1] + 3] if found else []
    return following[0] if len(following) == 2 and sum(following) == 0 and following[0] > 0 else 0


def test_most_workspaces_are_close_to_the_measured_ones() -> None:
    close = total = 0
    for problem, (forward, gradient, weight), moved_bytes in measured():
        ours = (
            problem.forward_bytes(),
            problem.forward_bytes(is_gradient=True),
            problem.weight_gradient_bytes(),
        )
        for workspace, mine in zip((forward, gradient, weight), ours, strict=True):
            close += abs(workspace - mine) <= 0.05 * moved_bytes
            total += 1
    assert total == 348
    assert close / total > 0.7
