"""Recordings with deep stacks, of which a million events take 280 MB: answered, and alike when they are compressed."""

import json
import lzma
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ligerprof.analyzers.explain.analysis import analyze
from ligerprof.snapshots.watch import Claim
from tests.snapshots.deep_stacks import deep_recording

EVENTS = 3_000


def test_events_of_one_stack_and_stamp_are_one_call_site(tmp_path: Path) -> None:
    path, packed = tmp_path / "deep.pickle", tmp_path / "deep.pickle.xz"
    path.write_bytes(pickle.dumps(deep_recording(EVENTS), protocol=4))
    packed.write_bytes(lzma.compress(path.read_bytes(), preset=0))

    found, of_packed = analyze(path), analyze(packed)

    texts = found.replayed.trace.objects("user_metadata")[1]
    assert len(texts) == len(set(texts)) < EVENTS / 3
    assert found.replayed.complete
    assert found.replayed.verified
    assert found.peak.to_json() == of_packed.peak.to_json()


@pytest.mark.slow
def test_a_million_events_take_a_quarter_of_the_limit_and_compressed_ones_have_the_same_answer(tmp_path: Path) -> None:
    path, packed = tmp_path / "deep.pickle", tmp_path / "deep.pickle.xz"
    subprocess.run([sys.executable, "-m", "tests.snapshots.deep_stacks", path, "1000000"], check=True)
    subprocess.run(["xz", "-0", "-k", path], check=True)

    answers = []
    for file in (path, packed):
        command = [sys.executable, "-m", "ligerprof", "explain", file, "--json"]
        answers.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))

    assert answers[0] == answers[1]
    taken_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    content = Claim(source="deep", unpacked_bytes=path.stat().st_size)
    # the program that made the file takes more than the analysis
    assert taken_bytes < content.memory_bytes
