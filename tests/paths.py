"""Where the files that tests read are kept."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DATA = REPOSITORY / "tests" / "data"
RECORDINGS = DATA / "snapshots"
PROGRAMS = DATA / "programs"
TRUTH = DATA / "truth"
RESULTS = REPOSITORY / "benchmarks" / "results"
