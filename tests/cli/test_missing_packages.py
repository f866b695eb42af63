"""Commands without a package that they need: one line before any work, and nothing left behind."""

import subprocess
import sys
from pathlib import Path

from tests.paths import RECORDINGS
from tests.sampling import sampled

SMALL = RECORDINGS / "small-lora.pickle.xz"
PROGRAM = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == sys.argv[1] else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
from ligerprof.cli.main import main
from ligerprof.own_process import claim
# as where `ligerprof` is typed: a process that simulates is then a fork of this one
claim()
main(sys.argv[2:], prog_name="ligerprof")
"""


@sampled(
    ("package", "command"),
    [
        ("peft", "step --model tiny --qlora 8"),
        ("peft", "estimate --model tiny --lora 8 --simulate"),
        ("deepspeed", "step --model tiny --engine deepspeed --precision mixed --device cuda"),
        ("bitsandbytes", "step --model tiny --lora 8 --quantization 8bit --device cuda"),
        ("bitsandbytes", "step --model tiny --optimizer adamw-8bit --device cuda"),
        ("triton", "step --model tiny --liger flce --device simulated"),
        ("triton", "kernels check rms"),
        ("matplotlib", f"plot {SMALL}"),
        ("matplotlib", "fit --model tiny --memory-limit 1GiB --no-simulate --figure fit.svg"),
        ("matplotlib", "bench flce --figure bench.svg"),
        ("tensorboard", "view ."),
        ("transformers", "step --model tiny --device simulated"),
        ("torch", "step --model tiny"),
        ("numpy", f"explain {SMALL}"),
    ],
    every=3,
)
def test_a_missing_package_is_one_line(package: str, command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, package, *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert package in done.stderr
    assert "pip install" in done.stderr
    assert list(tmp_path.iterdir()) == []
