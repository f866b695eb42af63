from ligerprof.recipe.training import TrainingRecipe
from ligerprof.runs.sweep.cells import Cell, CellStatus
from ligerprof.runs.sweep.runner import Watcher

CELL = Cell(key="", status=CellStatus.DONE, recipe=TrainingRecipe())


def test_time_left_shrinks_while_a_cell_runs() -> None:
    clock = [0.0]
    watcher = Watcher(lambda: clock[0])
    watcher.expect(5)
    assert watcher.left == "5 left"
    clock[0] = 60.0
    watcher.ended(CELL)
    assert watcher.left == "about 4 min left"
    clock[0] = 90.0
    # four cells of a minute each, half a minute into the first of them
    assert watcher.left == "about 4 min left"
    clock[0] = 120.0
    watcher.ended(CELL)
    watcher.expect(-2)
    clock[0] = 150.0
    assert watcher.left == "about 30 s left"
    # a cell that takes longer than the ones before it
    clock[0] = 400.0
    assert watcher.left == "about 0 s left"
    watcher.ended(CELL)
    assert watcher.left == "0 left"
