import io
from pathlib import Path

import pytest

from ligerprof.reports.terminal import (
    FiguresColumn,
    console,
    percent_error,
    phases_table,
    roles_table,
)
from ligerprof.roles import MemoryBreakdown, Phase, Role
from ligerprof.units import MIB
from tests.golden import assert_matches_golden

GOLDEN = Path(__file__).parent / "golden"

MEASURED = MemoryBreakdown(
    roles={
        Role.PARAMETERS: 2357 * MIB,
        Role.OPTIMIZER_STATES: 4714 * MIB,
        Role.CHECKPOINTS: 256 * MIB,
        Role.LOGITS: 3006 * MIB + 77,
        Role.ALLOCATOR_ROUNDING: 435,
    }
)
ESTIMATED = MemoryBreakdown(
    roles={
        Role.PARAMETERS: 2357 * MIB,
        Role.OPTIMIZER_STATES: 4714 * MIB,
        Role.CHECKPOINTS: 272 * MIB,
        Role.LOGITS: 2004 * MIB,
        Role.OTHER: 3 * MIB,
    }
)


def render(table: object) -> str:
    buffer = io.StringIO()
    console(buffer).print(table)
    return buffer.getvalue()


def phases_column(title: str, *, with_optimizer: bool) -> FiguresColumn:
    phases = {Phase.FORWARD: 10240 * MIB, Phase.BACKWARD: 13469 * MIB}
    if with_optimizer:
        phases[Phase.OPTIMIZER] = 9494 * MIB
    return FiguresColumn(title=title, roles=ESTIMATED, phases=phases, peak_bytes=13469 * MIB)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("roles_one", roles_table([FiguresColumn(title="estimated", roles=ESTIMATED)])),
        (
            "roles_two",
            roles_table(
                [FiguresColumn(title="estimated", roles=ESTIMATED), FiguresColumn(title="measured", roles=MEASURED)],
                reference=1,
            ),
        ),
        (
            "roles_three",
            roles_table(
                [
                    FiguresColumn(title="measured", roles=MEASURED),
                    FiguresColumn(title="simulated", roles=MEASURED),
                    FiguresColumn(title="estimated", roles=ESTIMATED),
                ]
            ),
        ),
        ("phases_one", phases_table([phases_column("estimated", with_optimizer=True)])),
        (
            "phases_two",
            phases_table(
                [phases_column("measured", with_optimizer=True), phases_column("estimated", with_optimizer=False)]
            ),
        ),
    ],
)
def test_tables_match_golden(name: str, table: object) -> None:
    assert_matches_golden(render(table), GOLDEN / f"{name}.txt")


@pytest.mark.parametrize(
    ("size_bytes", "reference_bytes", "text"),
    [
        (101 * MIB, 100 * MIB, "+1.00 %"),
        (99 * MIB, 100 * MIB, "-1.00 %"),
        (100 * MIB, MIB, "> 999 %"),
        (0, 0, "0.00 %"),
        (MIB, 0, "n/a"),
        (512, 1024, ""),
        (None, 5, "n/a"),
        (5, None, "n/a"),
    ],
)
def test_percent_error(size_bytes: int | None, reference_bytes: int | None, text: str) -> None:
    assert percent_error(size_bytes, reference_bytes) == text
