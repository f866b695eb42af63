"""Simulate every measured step of tests/data/truth and print the simulation's errors.

Run from the repository root: python -m benchmarks.simulate_truth [--only WORD]
"""

import argparse
import statistics
import warnings
from collections.abc import Iterable, Iterator

from tests.truth import Score, measured_steps, score, steps_with_own_kernels


def table(scores: Iterable[Score]) -> Iterator[str]:
    """Rows of a Markdown table."""
    yield "| step | measured peak, MiB | simulated | error | worst phase | first step | reserved | seconds |"
    yield "|---|---|---|---|---|---|---|---|"
    for item in scores:
        if item.step.peak_bytes is None or item.outcome.oom is not None:
            verdict = "out of memory on both" if item.verdict_agrees else "VERDICTS DIFFER"
            yield f"| {item.step.name} | {verdict} | | | | {item.first_step_error:+.4%} | | {item.seconds:.1f} |"
            continue
        yield (
            f"| {item.step.name} | {item.step.peak_bytes / 2**20:,.1f} | {item.outcome.peak_bytes / 2**20:,.1f}"
            f" | {item.peak_error:+.4%} | {item.worst_phase_error:+.4%} | {item.first_step_error:+.4%}"
            f" | {item.reserved_error:+.2%} | {item.seconds:.1f} |"
        )


def summary(scores: Iterable[Score]) -> str:
    """The median and the worst error, in a sentence."""
    fitting = [item for item in scores if item.step.peak_bytes is not None and item.outcome.oom is None]
    peaks = [abs(item.peak_error) for item in fitting]
    reserved = [abs(item.reserved_error) for item in fitting]
    return (
        f"{len(fitting)} steps. Peak: median {statistics.median(peaks):.4%}, worst {max(peaks):.4%}."
        f" Reserved: median {statistics.median(reserved):.2%}, worst {max(reserved):.2%}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="score steps whose name holds this word")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")
    scores = []
    for step in [*measured_steps(), *steps_with_own_kernels()]:
        if only in step.name:
            try:
                scores.append(score(step))
            # skip a model that the installed transformers does not run
            except Exception as error:
                print(f"<!-- {step.name}: {error} -->")
    print("\n".join(table(scores)))
    print(f"\n{summary(scores)}")


if __name__ == "__main__":
    main()
