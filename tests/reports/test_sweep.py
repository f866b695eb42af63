from ligerprof.reports.sweep import SweepProgress


def test_time_left_shrinks_while_a_cell_runs() -> None:
    clock = [0.0]
    progress = SweepProgress((), lambda: clock[0])
    progress.expect(5)
    assert progress.left == "5 left"
    clock[0] = 60.0
    progress.end_cell()
    assert progress.left == "about 4 min left"
    clock[0] = 90.0
    # four cells of a minute each, half a minute into the first of them
    assert progress.left == "about 4 min left"
    clock[0] = 120.0
    progress.end_cell()
    progress.expect(-2)
    clock[0] = 150.0
    assert progress.left == "about 30 s left"
    # a cell that takes longer than the ones before it
    clock[0] = 400.0
    assert progress.left == "about 0 s left"
    progress.end_cell()
    assert progress.left == "0 left"
