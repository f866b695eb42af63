"""Libraries on a simulated GPU; see library_checks.py."""

import subprocess
import sys
from pathlib import Path


def test_libraries_run_without_kernels(tmp_path: Path) -> None:
    program = Path(__file__).with_name("library_checks.py")
    ours = [
        sys.executable,
        "-m",
        "ligerprof",
        "run",
        "--device",
        "simulated",
        "--flash-attn",
        "-o",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(
        [*ours, "--", sys.executable, str(program)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "all checks passed" in done.stderr
    assert "flash-attn 2.8.3 is not installed: its functions took what its source allocates" in done.stderr
