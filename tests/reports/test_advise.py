import io
from pathlib import Path

from ligerprof.analyzers.estimate import Answer
from ligerprof.analyzers.search.budget import Method, Verdict
from ligerprof.analyzers.search.changes import LADDER, Advice, State, Step, expandable_segments
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.recipe.usable_memory import Limit
from ligerprof.reports.search import render_advice
from ligerprof.reports.terminal import console
from ligerprof.units import GIB
from tests.golden import assert_matches_golden

GOLDEN = Path(__file__).parent / "golden"


def test_every_state_of_a_rung_is_printed() -> None:
    changes = {change.name: change for change in LADDER}
    advice = Advice(
        recipe=TrainingRecipe(),
        limit=Limit(size_bytes=24 * GIB, source="--memory-limit"),
        needed_bytes=40 * GIB,
        verdict=Verdict(answer=Answer.DOES_NOT_FIT, held_bytes=24 * GIB, checked=Method.SIMULATED),
        steps=(
            Step(change=changes["kernels"], state=State.APPLIED, saved_bytes=6 * GIB, needed_bytes=34 * GIB),
            Step(change=changes["zero-2"], state=State.INAPPLICABLE, reason="needs several GPUs"),
            Step(change=changes["galore"], state=State.UNPRICED, reason="not estimated [yet]"),
            Step(change=changes["offload-all"], state=State.APPLIED, saved_bytes=14 * GIB, needed_bytes=20 * GIB),
            Step(
                change=changes["accumulation"],
                state=State.USELESS,
                saved_bytes=-GIB,
                needed_bytes=21 * GIB,
                reason="uses more than it saves here",
            ),
            Step(change=expandable_segments, state=State.SPARE, saved_bytes=GIB, needed_bytes=19 * GIB),
        ),
        plan=TrainingRecipe(engine="deepspeed", precision="mixed", zero=3, offload="all", liger="all"),
        plan_needed_bytes=20 * GIB,
        plan_verdict=Verdict(
            answer=Answer.FITS, held_bytes=20 * GIB, checked=Method.ESTIMATED, reason="simulate: not DeepSpeed"
        ),
        host_bytes=100 * GIB,
    )
    printed = io.StringIO()

    console(printed).print(render_advice(advice, "ligerprof step --liger all"))

    assert max(map(len, printed.getvalue().splitlines())) <= 100
    assert_matches_golden(printed.getvalue(), GOLDEN / "advise.txt")
