from ligerprof.reports.sweep import RemainingTime


def test_time_left_shrinks_while_a_cell_runs() -> None:
    clock = [0.0]
    left = RemainingTime(lambda: clock[0])
    assert left.text(5) == "5 left"
    clock[0] = 60.0
    left.ended()
    assert left.text(4) == "about 4 min left"
    clock[0] = 90.0
    # four cells of a minute, half a minute into the first of them
    assert left.text(4) == "about 4 min left"
    clock[0] = 120.0
    left.ended()
    clock[0] = 150.0
    assert left.text(1) == "about 30 s left"
    # a cell that takes longer than those before it
    clock[0] = 400.0
    assert left.text(1) == "about 0 s left"
    assert left.text(0) == "0 left"
