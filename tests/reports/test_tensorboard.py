"""What a step leaves for TensorBoard, read back as TensorBoard reads it."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest

from ligerprof.errors import OutputError
from ligerprof.recipe.training import TrainingRecipe
from ligerprof.reports.step import scalars, write_summaries
from ligerprof.roles import STEP_PHASES, Role
from ligerprof.runs.directory import create_run_directory
from ligerprof.runs.step import StepReport, run_step
from ligerprof.units import MIB

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> StepReport:
    recipe = TrainingRecipe(model="tiny", batch=2, seq=128, device="simulated")
    run = create_run_directory(tmp_path_factory.mktemp("runs") / "001")
    return run_step(recipe, run, lambda _: None)


@pytest.fixture(scope="module")
def written(report: StepReport) -> Any:
    write_summaries(report)
    accumulator = accumulators.EventAccumulator(str(report.run.tensorboard), size_guidance={"images": 0})
    accumulator.Reload()
    return accumulator


def test_scalars_are_the_reports_figures(report: StepReport, written: Any) -> None:
    found = {tag: written.Scalars(tag) for tag in written.Tags()["scalars"]}
    assert {tag: [event.step for event in events] for tag, events in found.items()} == {
        tag: list(values) for tag, values in scalars(report).items()
    }
    first, steady = found["peak_mib/simulated"]
    assert (first.step, steady.step) == (1, report.outcome.profiled_step)
    assert first.value == pytest.approx(report.outcome.first_step_peak_bytes / MIB)

    values = {tag: events[-1].value for tag, events in found.items()}
    assert values["peak_mib/simulated"] == pytest.approx(report.outcome.peak_bytes / MIB)
    for phase in STEP_PHASES:
        assert values[f"phase_mib/{phase.value}"] == pytest.approx(report.outcome.phases[phase] / MIB)
    roles = [values[f"role_mib/{role.value}"] for role in Role]
    assert sum(roles) == pytest.approx(values["peak_mib/simulated"])
    assert report.error_ratio is not None
    assert values["estimate/error_percent"] == pytest.approx(100 * report.error_ratio, abs=1e-4)
    assert values["peak_mib/estimated"] == pytest.approx(
        values["peak_mib/simulated"] * (1 + values["estimate/error_percent"] / 100)
    )
    # a simulated step has no times
    assert not [tag for tag in values if tag.startswith("speed/")]


def test_the_peak_is_there_as_a_figure(written: Any) -> None:
    images = pytest.importorskip("PIL.Image")
    (image,) = written.Images("peak/by_role")

    drawn = images.open(io.BytesIO(image.encoded_image_string)).convert("RGB")

    assert drawn.width > drawn.height > 50
    # bars of several roles, not an empty page
    large = [color for count, color in drawn.getcolors(maxcolors=2**24) if count > 0.01 * drawn.width * drawn.height]
    assert len(large) >= 4


def test_the_step_is_there_in_words(report: StepReport, written: Any) -> None:
    (tag,) = written.Tags()["tensors"]
    assert tag == "step/text_summary"
    text = written.Tensors(tag)[0].tensor_proto.string_val[0].decode()
    assert "(no GPU was used)" in text
    assert report.recipe.summary in text


def test_nothing_but_events_is_written(report: StepReport, written: Any) -> None:
    names = [path.name for path in Path(report.run.tensorboard).iterdir()]
    assert names
    assert all(name.startswith("events.out.tfevents.") for name in names)


def test_a_folder_that_cannot_be_written_is_one_error(report: StepReport, tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(report, run=create_run_directory(tmp_path / "run"))
    elsewhere.run.tensorboard.write_text("a file")

    with pytest.raises(OutputError, match=r"tensorboard: no TensorBoard scalars \(File exists\)"):
        write_summaries(elsewhere)
