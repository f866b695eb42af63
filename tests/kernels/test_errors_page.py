"""The page of the kernels' errors is what its script writes from the committed results."""

import importlib.util
from typing import Any

from tests.paths import REPOSITORY


def script() -> Any:
    spec = importlib.util.spec_from_file_location("kernel_errors", REPOSITORY / "benchmarks/kernel_errors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    import sys

    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def test_the_page_shows_the_committed_results() -> None:
    kernel_errors = script()
    files = sorted(kernel_errors.RESULTS.glob("kernel-errors-*.jsonl"))
    assert files
    assert kernel_errors.PAGE.read_text(encoding="utf-8") == kernel_errors.write_page(files)
