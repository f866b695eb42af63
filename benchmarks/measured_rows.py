"""Compare estimates with every measured step: peaks, and the reserved bytes that replaying the estimate gives.

    python -m benchmarks.measured_rows                  # a table by file, and each row that is far off
    python -m benchmarks.measured_rows --check          # exit 1 if a median or a worst row is worse than in the results
    python -m benchmarks.measured_rows --write          # the errors of each row, into the results

The rows are those of benchmarks/results and tests/data/truth that a recipe describes, without those whose kernels have
changed since. Reserved bytes of a row that ran under a memory limit are left out where the estimate reserves more than
the limit. The results, in benchmarks/results/measured-rows.json, have the errors of both by file and row.

Run from the repository root.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ligerprof.analyzers.estimate import estimate
from ligerprof.errors import LigerprofError
from ligerprof.models import spec_from_config
from ligerprof.recipe.categories import Engine
from ligerprof.recipe.training import TrainingRecipe
from tests import rank_truth
from tests.analyzers.estimate.test_truth import DEEPSPEED_ROWS, deepspeed_recipe_of, drawn_recipe_of
from tests.paths import RESULTS
from tests.truth import measured_steps

sys.path.append(str(Path(__file__).parent))
import architectures
import experts_in_turn

ERRORS = RESULTS / "measured-rows.json"
FILES = (
    "accuracy-h200 architectures-h200-rows ddp-alone-h200x2 evaluated-h200x2 experts-in-turn-h200"
    " fsdp1-alone-h200 low-bit-h200 optimizers-h100 ranks-h200x2 ranks-recomputation-h200x2 recomputation-h100"
    " saving-h200x2 steps-h200 study-h200 zero-h200 zero-programs-h200x2"
)
# reserved bytes further off are printed, as shares
FAR = 0.05
# errors that differ by less are the same
SAME = 1e-6
KINDS = ("peak", "reserved")


class Row(NamedTuple):
    """A measured step: the bytes of the rank with the highest peak."""

    recipe: TrainingRecipe
    peak_bytes: int
    reserved_bytes: int | None
    first: bool = False


def rows_of(file: str) -> Iterator[tuple[str, Row | LigerprofError]]:
    """Each finished step of a file, by its number or name; an error where today's options have no recipe for it."""
    path = next(RESULTS.glob(f"{file}.json*"))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        found = dict(enumerate(map(json.loads, text.splitlines())))
    elif isinstance(whole := json.loads(text), list):
        found = dict(enumerate(whole))
    else:
        found = {name: {**row["cuda"], "architecture": name} for name, row in whole.items() if "cuda" in row}
    for name, row in found.items():
        measured = bytes_of(row)
        if measured is not None:
            try:
                yield str(name), Row(recipe_of(row), *measured)
            except LigerprofError as error:
                yield str(name), error


def bytes_of(row: Mapping[str, Any]) -> tuple[int, int | None] | None:
    if "failed" in row or row.get("oom") or row.get("error") or row.get("kind", "row") not in ("row", "cell"):
        return None
    if row.get("peak_bytes"):
        return row["peak_bytes"], row.get("reserved_bytes")
    ranks = [rank for rank in row.get("ranks", ()) if "peaks" in rank]
    if not ranks:
        return None
    steady = min(row["recipe"]["warmup"], len(ranks[0]["peaks"]) - 1)
    highest = max(ranks, key=lambda rank: int(rank["peaks"][steady]))
    return highest["peaks"][steady], highest["reserved"][steady]


def recipe_of(row: dict[str, Any]) -> TrainingRecipe:
    if "architecture" in row:
        name = row["architecture"]
        spec = spec_from_config(architectures.config_of(name), name=name)
        return TrainingRecipe(model=spec, **architectures.options_of(name))
    if "options" in row:
        return drawn_recipe_of(row)
    if "recipe" in row:
        return TrainingRecipe.from_json(row["recipe"])
    options = experts_in_turn.options(row["model"], row["precision"], checkpointing=row["checkpointing"])
    spec = spec_from_config(architectures.config_of(row["model"]), name=row["model"])
    return TrainingRecipe(model=spec, **options)


def truth() -> Iterator[tuple[str, str, Row]]:
    """The steps of tests/data/truth: file, name and row."""
    for step in measured_steps():
        if step.peak_bytes is not None:
            # a later row of one process found segments of the rows before
            reserved_bytes = step.reserved_bytes if step.fresh else None
            yield "h200-steps", step.name, Row(step.recipe(), step.peak_bytes, reserved_bytes)
    for number, row in enumerate(DEEPSPEED_ROWS):
        if not row.get("oom"):
            kept = Row(deepspeed_recipe_of(row), row["peak_bytes"], row["reserved_bytes"], row["steps_run"] == 1)
            yield "h200-deepspeed", str(number), kept
    for row in rank_truth.ROWS:
        kept = Row(rank_truth.recipe_of(row), row["peaks"][-1], row["reserved"][-1])
        yield "h200x2-ranks", rank_truth.name_of(row), kept


def errors_of(row: Row) -> dict[str, float]:
    """Signed relative errors of an estimate of the steps alone, without an evaluation or saving."""
    recipe = row.recipe
    saves = recipe.engine.is_fsdp or recipe.engine is Engine.DEEPSPEED
    found = estimate(dataclasses.replace(recipe, eval_batch=None, **({"save_whole": False} if saves else {})))
    peak_bytes = found.first_step_peak_bytes if row.first else found.peak_bytes
    errors = {"peak": peak_bytes / row.peak_bytes - 1}
    limit_bytes = recipe.memory_limit_bytes
    if row.reserved_bytes and (limit_bytes is None or found.run.reserved_bytes <= limit_bytes):
        errors["reserved"] = found.run.reserved_bytes / row.reserved_bytes - 1
    return errors


def all_errors(only: str) -> dict[str, dict[str, dict[str, float]]]:
    """Errors by file and row; rows that have no estimate are printed."""
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    rows = [(file, *named) for file in FILES.split() for named in rows_of(file)]
    for file, name, row in [*rows, *truth()]:
        if only not in file:
            continue
        try:
            if isinstance(row, LigerprofError):
                raise row
            errors = errors_of(row)
        except LigerprofError as error:
            print(f"{file} {name}: {error}", file=sys.stderr)
            continue
        found[file][name] = errors
        if abs(errors.get("reserved", 0)) > FAR:
            print(
                f"{file} {name}: reserved {errors['reserved']:+.2%}, peak {errors['peak']:+.4%}, {row.recipe.summary}"
            )
    return found


def measures(rows: Mapping[str, Mapping[str, float]], kind: str) -> tuple[int, float, float]:
    """Count, median and worst of the absolute errors."""
    errors = [abs(errors[kind]) for errors in rows.values() if kind in errors]
    return (len(errors), statistics.median(errors), max(errors)) if errors else (0, 0.0, 0.0)


def table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[str]:
    yield "| rows | steps | peak, median | worst | steps | reserved, median | worst |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    whole = {f"{file} {name}": errors for file, rows in found.items() for name, errors in rows.items()}
    for file, rows in {**found, "all": whole}.items():
        cells = (f"{count} | {median:.4%} | {worst:.2%}" for count, median, worst in (measures(rows, k) for k in KINDS))
        yield f"| {file} | {' | '.join(cells)} |"


def worse(found: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[str]:
    """A line per median or worst row that is worse than it was, of the rows that both have."""
    for file, rows in found.items():
        shared = rows.keys() & before.get(file, {}).keys()
        for kind in KINDS:
            now, then = (measures({name: one[file][name] for name in shared}, kind) for one in (found, before))
            for word, new, old in zip(("median", "worst row"), now[1:], then[1:], strict=True):
                if new > old + SAME:
                    yield f"{file}: the {word} of {kind} is {new:.4%} and was {old:.4%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Exit 1 if a median or a worst row became worse.")
    parser.add_argument("--write", action="store_true", help="Write the errors of each row.")
    parser.add_argument("--only", default="", help="Files with this word in their name.")
    arguments = parser.parse_args()
    found = all_errors(arguments.only)
    print("\n".join(table(found)))
    if arguments.check:
        lines = list(worse(found, json.loads(ERRORS.read_text(encoding="utf-8"))))
        print("\n".join(lines or ["No median and no worst row is worse than it was."]))
        sys.exit(bool(lines))
    if arguments.write:
        rounded = {
            file: {name: {kind: round(error, 8) for kind, error in errors.items()} for name, errors in rows.items()}
            for file, rows in found.items()
        }
        ERRORS.write_text(json.dumps(rounded, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
