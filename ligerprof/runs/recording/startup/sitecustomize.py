"""Python runs this at start-up if `ligerprof run` put its folder on PYTHONPATH; opens the door to the recording.

The recorded program may run in an environment without ligerprof, so the package is loaded from its own files, and
this folder leaves the search path again. A sitecustomize that this one hides runs as well.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would be imported for this alone
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))  # noqa: PTH120


def _leave_search_path() -> None:
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]  # noqa: PTH100


def _run_hidden() -> None:
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _load_package() -> None:
    if "ligerprof" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "ligerprof",
        os.path.join(_PACKAGE, "__init__.py"),  # noqa: PTH118
        submodule_search_locations=[_PACKAGE],
    )
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["ligerprof"] = module
        spec.loader.exec_module(module)


_leave_search_path()
if os.environ.get("LIGERPROF"):
    try:
        _load_package()
        from ligerprof.runs.recording.door import open_door

        open_door()
    except Exception as error:
        # an old Python, for example; the program itself must run
        print(f"ligerprof: nothing is recorded in this process: {error!r}", file=sys.stderr)  # noqa: T201
_run_hidden()
