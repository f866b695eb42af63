import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import ligerprof.pytest_plugin as plugin
from tests.torch_memory.allocator.programs import MIB, SlowAllocator

class Recorded(plugin.GpuMemory):
    @staticmethod
    def missing_reason():
        return None

    def start(self):
        self.program = program = SlowAllocator()
        program.alloc(1, 30 * MIB)
        program.events[-1]["frames"] = [{"filename": "train.py", "line": 7, "name": "<module>"}]

    def stop(self):
        return max(self.program.allocated), self.program.snapshot()

plugin.GpuMemory = Recorded
"""


def run(folder: Path, test: str, *, conftest: str = "") -> str:
    """What pytest prints for a file with one test."""
    (folder / "conftest.py").write_text(conftest, encoding="utf-8")
    (folder / "test_it.py").write_text(f"import pytest\n\n{test}\n", encoding="utf-8")
    # an installed package registers the plug-in itself
    plugins = ("-p", "no:ligerprof", "-p", "ligerprof.pytest_plugin", "-p", "no:cacheprovider", "--strict-markers")
    command = [sys.executable, "-m", "pytest", "-rs", *plugins, "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def marked(size: str, body: str = "pass") -> str:
    return f"@pytest.mark.limit_gpu_memory({size})\ndef test_step():\n    {body}"


@pytest.mark.slow
def test_a_test_under_the_limit_passes(tmp_path: Path) -> None:
    assert "1 passed" in run(tmp_path, marked("'30MiB'"), conftest=CONFTEST)


def test_a_test_over_the_limit_fails_and_lists_who_held_the_memory(tmp_path: Path) -> None:
    printed = run(tmp_path, marked("'29MiB'"), conftest=CONFTEST)

    assert "1 failed" in printed
    assert "30.0 MiB allocated, over the limit of 29.0 MiB" in printed
    assert "Peak 30.0 MiB" in printed
    assert "train.py:7 <module>" in printed


@pytest.mark.slow
def test_a_failing_test_keeps_its_own_error(tmp_path: Path) -> None:
    printed = run(tmp_path, marked("'1MiB'", "assert 1 == 2"), conftest=CONFTEST)

    assert "assert 1 == 2" in printed
    assert "over the limit" not in printed


def test_a_wrong_size_is_an_error_even_without_a_gpu(tmp_path: Path) -> None:
    sizes = ("", "'lots'", "'1GiB', 2", "1.5")
    tests = [marked(size).replace("test_step", f"test_step_{index}") for index, size in enumerate(sizes)]

    printed = run(tmp_path, "\n\n".join(tests))

    assert "limit_gpu_memory" in printed
    for index in range(len(sizes)):
        assert f"ERROR at setup of test_step_{index}" in printed
    assert "4 errors" in printed


def test_without_a_gpu_the_test_is_skipped_with_the_reason(tmp_path: Path) -> None:
    conftest = "import torch\ntorch.cuda.is_available = lambda: False\n"

    printed = run(tmp_path, marked("'1GiB'"), conftest=conftest)

    assert "1 skipped" in printed
    assert "limit_gpu_memory: no CUDA device" in printed


@pytest.mark.slow
def test_other_tests_are_left_alone(tmp_path: Path) -> None:
    assert "1 passed" in run(tmp_path, "def test_step():\n    pass", conftest=CONFTEST.replace("30 * MIB", "1 / 0"))


@pytest.mark.gpu
def test_on_a_gpu_the_limit_is_on_max_memory_allocated(tmp_path: Path) -> None:
    body = "import torch\n    first = torch.empty(40 * 2**20, dtype=torch.uint8, device='cuda')"
    tests = [marked("'40MiB'", body), marked("'39MiB'", body).replace("test_step", "test_smaller_limit")]

    printed = run(tmp_path, "\n\n".join(tests))

    assert "1 failed, 1 passed" in printed
    assert "40.0 MiB allocated, over the limit of 39.0 MiB" in printed
    assert "Peak 40.0 MiB" in printed
    assert "test_it.py:" in printed


@pytest.mark.gpu
def test_on_a_gpu_a_test_that_runs_out_of_memory_keeps_its_error_and_shows_the_failure(tmp_path: Path) -> None:
    body = (
        "import torch\n"
        "    total = torch.cuda.get_device_properties(0).total_memory\n"
        "    torch.cuda.set_per_process_memory_fraction(2**30 / total)\n"
        "    held = [torch.empty(300 * 2**20, dtype=torch.uint8, device='cuda') for _ in range(4)]"
    )

    printed = run(tmp_path, marked("'2GiB'", body))

    assert "OutOfMemoryError" in printed
    assert "GPU memory" in printed
    assert "300.0 MiB requested, 900.0 MiB allocated" in printed


@pytest.mark.gpu
def test_on_a_gpu_each_test_has_its_own_peak(tmp_path: Path) -> None:
    large = marked("'100MiB'", "import torch\n    torch.empty(90 * 2**20, dtype=torch.uint8, device='cuda')")
    small = marked("'20MiB'", "import torch\n    torch.empty(2**20, device='cuda')").replace("test_step", "test_small")

    assert "2 passed" in run(tmp_path, f"{large}\n\n{small}")


@pytest.mark.slow
def test_a_recording_that_cannot_be_read_does_not_hide_what_happened(tmp_path: Path) -> None:
    empty = CONFTEST.replace("self.program.snapshot()", "{'segments': [], 'device_traces': [[]]}")
    broken = CONFTEST.replace("return max(self.program.allocated)", "return self.lost()")

    assert "over the limit of 1.0 MiB\nWhat held the memory is not known" in run(
        tmp_path, marked("'1MiB'"), conftest=empty
    )
    assert "assert 1 == 2" in run(tmp_path, marked("'1MiB'", "assert 1 == 2"), conftest=broken)
